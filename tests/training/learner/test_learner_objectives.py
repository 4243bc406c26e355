"""The settings of an algorithm, through packer and learner, give the gradient of plain torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plain_objective
import pytest
import torch
from composed_config import load
from learner_setup import (
    CPU,
    Example,
    make_examples,
    pack,
    plain_logprobs,
    plain_model,
    record_gradients,
)
from light_samples import following
from plain_objective import Response

from april_rl.config import TrainConfig
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Kl
from april_rl.start.assembly.packer import build_packer
from april_rl.training.batch.packing import Batch
from april_rl.training.learner.objective import Objective
from april_rl.training.learner.row import Anchor, PackedRow
from april_rl.training.runtime.worker_parts import build_learner
from april_rl.types import Group, Prompt, Sample, ScoredGroup

pytestmark = pytest.mark.usefixtures("_group")

VERSION, BUDGET = 5, 70
DECAY = 0.5
DEFAULTS: dict[str, Any] = {
    "loss": "ppo_clip",
    "ratio": "proximal",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "aggregation": "token_mean",
    "kl": "none",
    "kl_coefficient": 0.0,
    "entropy_coefficient": 0.0,
    "correction": "truncate",
    "weight_bounds": None,
    "geometric_mask": None,
    "opsm_threshold": None,
}
BYPASS = {"ratio": "behaviour", "correction": "none"}
CUT = {"correction": "truncate", "weight_bounds": [0.0, 1.2]}
PENALTIES = {
    "clip_low": 0.002,
    "clip_high": 0.002,
    "kl_coefficient": 0.7,
    "entropy_coefficient": 0.2,
}
CASES: dict[str, dict[str, Any]] = {
    "ppo_clip": CUT,
    "dual_clip, bypass": {**BYPASS, "dual_clip": 1.3, "aggregation": "sequence_mean"},
    "no correction": {"correction": "none", "aggregation": "constant_length"},
    "gspo": {
        "loss": "gspo",
        "clip_low": 0.003,
        "clip_high": 0.004,
        "correction": "sequence_truncate",
        "weight_bounds": [0.0, 1.5],
    },
    "gspo, bypass": {**BYPASS, "loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.02},
    "cispo": {
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 0.01,
        "correction": "mask",
        "weight_bounds": [0.7, 1.3],
    },
    "cispo, bypass": {**BYPASS, "loss": "cispo", "aggregation": "constant_length"},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "sapo, masks": {
        **BYPASS,
        "loss": "sapo",
        "geometric_mask": [0.8, 1.2],
    },
    "dppo_tv": {**BYPASS, "loss": "dppo_tv", "clip_low": 0.001, "clip_high": 0.001},
    "dppo_kl": {
        **BYPASS,
        "loss": "dppo_kl",
        "clip_low": 1e-5,
        "clip_high": 1e-5,
        "geometric_mask": [0.8, 1.2],
    },
    "policy_gradient": {"loss": "policy_gradient", "aggregation": "constant_length"},
    "policy_gradient, bypass": {**BYPASS, "loss": "policy_gradient", **CUT},
    "opsm": {"clip_low": 0.002, "clip_high": 0.002, "opsm_threshold": 0.001},
    "opsm, bypass": {**BYPASS, "opsm_threshold": 0.01},
    "k2, entropy": {**PENALTIES, "kl": "k2", "correction": "mask", "weight_bounds": [0.5, 1.4]},
    "k3, entropy": {**PENALTIES, "kl": "k3", "geometric_mask": [0.9, 1.07]},
}


@pytest.fixture(autouse=True)
def _rounding_does_not_decide_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april_rl.training.learner.optimizer.EPS", 1e-3)


def config_of(path: str, settings: dict[str, Any], *overrides: str) -> TrainConfig:
    """Return the configuration as the command line does: float32, two minibatches, half of the age
    weights.
    """
    written = [
        f"algorithm.{key}={value}".replace("None", "null") for key, value in settings.items()
    ]
    return load(
        "+recipe=tiny_cpu",
        f"model.path={path}",
        "learner.compute_dtype=float32",
        f"learner.age_decay={DECAY}",
        f"rollout.max_response_tokens={BUDGET}",
        "rollout.temperature=0.8",
        "trainer.num_minibatches=2",
        "optimizer.lr=3e-3",
        "optimizer.max_grad_norm=1e6",
        *written,
        *overrides,
    )


def ages_of(example: Example) -> list[int]:
    """Return ages: the first half of a response is two versions old, the rest one."""
    half = example.num_response // 2
    return [2] * half + [1] * (example.num_response - half)


def sample_of(example: Example, number: int) -> Sample:
    prompt_ids = example.token_ids[: example.num_prompt]
    prompt = Prompt(id=number, token_ids=prompt_ids, text="", answer="", source="")
    sample = Sample(prompt=prompt, index=0)
    ages, response = np.asarray(ages_of(example)), example.token_ids[example.num_prompt :]
    for age in (2, 1):
        (places,) = np.nonzero(ages == age)
        if not len(places):
            continue
        part = slice(places[0], places[-1] + 1)
        logprobs = tuple(example.behaviour_logprobs[part].tolist())
        completion = following(
            sample,
            response[part],
            version=VERSION - age,
            logprobs=logprobs,
            finish_reason="stop" if age == 1 else None,
        )
        sample = sample.with_span(completion)
    return sample


def batch_of(config: TrainConfig, examples: Sequence[Example]) -> Batch:
    """Pack each example as a group of one sample with the real packer."""
    samples = [sample_of(example, number) for number, example in enumerate(examples)]
    groups = [
        ScoredGroup(group=Group(prompt=sample.prompt, samples=(sample,)), rewards=(0.0,))
        for sample in samples
    ]
    advantages = [np.asarray([example.advantage]) for example in examples]
    packer = build_packer(config, num_ranks=1, hidden_size=64)
    return packer.pack(groups, advantages, policy_version=VERSION)


def plain_gradients(
    path: str, minibatches: list[list[Example]], settings: dict[str, Any], *, cap: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the same gradients from plain torch, with the loss of every minibatch."""
    model = plain_model(path)
    start = [[plain_logprobs(model, e).detach() for e in part] for part in minibatches]
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3, weight_decay=0.0)
    losses = []
    for examples, proximals in zip(minibatches, start, strict=True):
        adamw.zero_grad()
        responses = [
            Response(
                logprobs=plain_logprobs(model, example),
                proximal=proximal,
                behaviour=torch.from_numpy(example.behaviour_logprobs),
                reference=proximal,
                advantage=example.advantage,
                token_weights=[DECAY**age if age <= cap else 0.0 for age in ages_of(example)],
            )
            for example, proximal in zip(examples, proximals, strict=True)
        ]
        loss = plain_objective.objective(responses, settings, budget=BUDGET)
        loss.backward()
        losses.append(loss.item())
        adamw.step()
    return {name: p.grad for name, p in model.named_parameters()}, losses


def assert_same_update(
    path: str, settings: dict[str, Any], *overrides: str, cap: int = 5
) -> dict[str, float]:
    """Check that the second of two steps has the gradient of plain torch, to 1e-5 of its norm."""
    examples = make_examples(path, noise=0.3, age=1)
    config = config_of(path, settings, *overrides)
    learner, _ = build_learner(config, device="cpu")
    with record_gradients(learner._policy) as gradients:
        metrics = learner.update(batch_of(config, examples).of_rank(0)).read()
    chosen = {**DEFAULTS, **settings}
    expected, losses = plain_gradients(path, [examples[::2], examples[1::2]], chosen, cap=cap)
    found = gradients[-1]
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    error = torch.stack([(found[name] - g).norm() for name, g in expected.items()]).norm()
    assert norm > 1e-3
    assert error <= 1e-5 * norm, (error / norm).item()
    assert metrics["loss/total"] == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-6)
    return metrics


@pytest.mark.parametrize("name", CASES)
def test_every_loss_correction_and_aggregation_has_the_gradient_of_plain_torch(path, name):
    """For every loss, decoupled and in bypass. Fails when a setting does not reach the part that it
    names, when a weight, a mask or a term is left out, or when the second minibatch's ratio is
    taken against weights that have already changed.
    """
    metrics = assert_same_update(path, CASES[name])
    masks = {"geometric_mask", "opsm_threshold"}
    is_masking = CASES[name].get("correction") == "mask" or bool(masks & CASES[name].keys())
    assert (0 < metrics["loss/masked_frac"] < 1) == is_masking
    assert (metrics["loss/is_weight_mean"] == 1.0) == (CASES[name].get("correction") == "none")
    assert ("loss/reference_kl" in metrics) == ("kl" in CASES[name])
    has_clip = CASES[name].get("loss", "ppo_clip") not in ("sapo", "policy_gradient")
    assert (metrics["loss/clip_frac"] > 0) == has_clip


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_tokens_beyond_the_cap_get_no_gradient_in_any_aggregation(path, aggregation):
    """Invariant 7, up to the weights. Fails when masked tokens count in a denominator, or still
    have an entropy bonus or a divergence.
    """
    settings = {**PENALTIES, "kl": "k2", "aggregation": aggregation}
    overrides = ("rollout.on_stale=mask", "rollout.max_staleness=1")
    assert_same_update(path, settings, *overrides, cap=1)


@pytest.mark.parametrize(("current", "is_masking"), [(-1.0, True), (0.0, False)])
def test_opsm_uses_the_current_weights_and_not_the_proximal_ones(path, current, is_masking):
    """The bad responses are one nat per token below the engine, either now or at the start of the
    update.
    """
    row = PackedRow.of(pack(make_examples(path, noise=0.3, age=1), total=1), device=CPU)
    objective = Objective(AlgorithmConfig(opsm_threshold=0.5))
    anchor = Anchor(row.credits, proximal=row.behaviour_logprobs - 1.0 - current)
    row_loss = objective.of(row, row.behaviour_logprobs + current, anchor)
    is_bad = row.credits < 0
    assert 0 < is_bad.double().mean() < 1
    assert row_loss.is_masked.tolist() == (is_bad & is_masking).tolist()


def test_kl_in_the_reward_is_taken_from_the_advantages_with_its_coefficient(path):
    """The reference differs from the policy. Fails when the term is added instead, or
    not weighted.
    """
    row = PackedRow.of(pack(make_examples(path, noise=0.3, age=1), total=1), device=CPU)
    reference = row.behaviour_logprobs + torch.linspace(-1.0, 1.0, len(row.labels))

    def loss(config: AlgorithmConfig, advantages: torch.Tensor) -> torch.Tensor:
        behaviour = row.behaviour_logprobs
        anchor = Anchor(advantages, proximal=behaviour, reference=reference)
        return Objective(config).of(row, behaviour, anchor).total

    found = loss(AlgorithmConfig(kl=Kl.k1, kl_coefficient=0.7), row.credits)
    lengths = row.responses.lengths.tolist()
    k1 = (row.behaviour_logprobs - reference).split(lengths)
    to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in k1])
    expected = loss(AlgorithmConfig(), row.credits - 0.7 * to_go)
    torch.testing.assert_close(found, expected)
    assert abs(found - loss(AlgorithmConfig(), row.credits)) > 1
