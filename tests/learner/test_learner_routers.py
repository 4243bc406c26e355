"""Routers that repeat the experts of an earlier pass, in every family that the learner knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from learner_setup import (
    NO_ADAPTERS,
    TEMPERATURE,
    Example,
    gradients_seen,
    group_of_one,
    make_examples,
    make_learner,
    pack,
    pack_minibatch,
)
from tiny_architectures import tiny_config, tiny_model
from torch import Tensor

from april_rl.config.choices import RouterReplay
from april_rl.learner.mesh import build_mesh
from april_rl.learner.model_sizes import model_sizes
from april_rl.learner.policy import Policy, build_policy
from april_rl.learner.routers import _CHOOSING_CALL, Choices, Routers
from april_rl.learner.row import PackedRow

CPU = torch.device("cpu")
# Each has its own class of router.
FAMILIES = (
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "olmoe", "flex_olmo"),
    *("granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa", "hunyuan_v1_moe"),
    *("deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "kimi_linear"),
    "nemotron_h",
)
VOCABULARY = 98  # of make_examples

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about tiny configurations


@pytest.fixture(scope="module", autouse=True)
def _group():
    with group_of_one():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


def write(folder: Path, model_type: str) -> str:
    tiny_model(tiny_config(model_type, vocab_size=VOCABULARY)).save_pretrained(folder)
    return str(folder)


def build(path: str, *, activation_checkpointing: bool = False) -> Policy:
    return build_policy(
        Path(path),
        mesh=build_mesh("cpu", shard_size=0),
        device=CPU,
        compute_dtype=torch.float32,
        activation_checkpointing=activation_checkpointing,
        temperature=TEMPERATURE,
    )


def examples_of(num: int = 4) -> list[Example]:
    """Return examples whose behaviour log-probabilities are not the model's."""
    generator = torch.Generator().manual_seed(0)
    return [
        Example(
            token_ids=tuple(torch.randint(3, VOCABULARY, (20,), generator=generator).tolist()),
            num_prompt=4,
            behaviour_logprobs=torch.zeros(16).numpy(),
            advantage=1.0 - 2 * (index % 2),
            age=1,
        )
        for index in range(num)
    ]


def passed(
    policy: Policy, routers: Routers, choices: Choices | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and gradients of a row with these choices."""
    row = PackedRow.of(pack(examples_of(), total=1), device=CPU)
    policy.zero_grad()
    with routers.repeating(choices):
        logprobs, _ = policy(row)
        (logprobs * row.advantages).sum().backward()
    grads = {n: p.grad.full_tensor().clone() for n, p in policy.named_parameters()}
    return logprobs.detach(), grads


def moved(choices: Choices, num_experts: int) -> Choices:
    """Return other choices: the next expert after each."""
    return tuple((choice + 1) % num_experts for choice in choices)


def test_every_known_router_is_tried(path):
    """Fails when a class is in the list and in no family here, or finds no router."""
    names = {type(part).__name__ for part in build(path).modules()}
    assert len(names & _CHOOSING_CALL.keys()) == 1
    assert len(FAMILIES) == len(_CHOOSING_CALL)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_repeating_its_own_choice_changes_no_bit(path, activation_checkpointing):
    policy = build(path, activation_checkpointing=activation_checkpointing)
    plain = passed(policy, Routers(), None)
    routers = Routers(policy)
    chosen = passed(policy, routers, None)
    repeated = passed(policy, routers, routers.last_choices())
    for logprobs, grads in (chosen, repeated):
        assert torch.equal(logprobs, plain[0])
        for name, grad in grads.items():
            assert torch.equal(grad, plain[1][name]), name


def test_the_order_of_the_experts_does_not_matter(path):
    """Fails when a weight goes to another expert than the one whose score it is."""
    policy = build(path)
    routers = Routers(policy)
    plain, grads = passed(policy, routers, None)
    turned = tuple(choice.flip(-1) for choice in routers.last_choices())
    logprobs, found = passed(policy, routers, turned)
    torch.testing.assert_close(logprobs, plain, atol=1e-5, rtol=1e-5)
    for name, grad in grads.items():
        assert (found[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-6, name


def test_other_choices_are_repeated_with_weights_and_gradients_of_the_scores(path):
    """Against finite differences along the gradient of the routers alone. Fails when a weight is
    that of another expert, or has no gradient; some routers' weights do not depend on all scores.
    """
    policy = build(path, activation_checkpointing=True)
    routers = Routers(policy)
    own, _ = passed(policy, routers, None)
    others = moved(routers.last_choices(), num_experts=4)
    before, grads = passed(policy, routers, others)
    assert not torch.equal(before, own)
    for choice, other in zip(routers.last_choices(), others, strict=True):
        assert torch.equal(choice, other)
    known = [n for n, part in policy.named_modules() if type(part).__name__ in _CHOOSING_CALL]
    names = [n for n in grads if n.rpartition(".")[0].removesuffix(".wg") in known]
    slope = sum(grads[name].square().sum() for name in names)
    assert slope > 0
    advantages = PackedRow.of(pack(examples_of(), total=1), device=CPU).advantages
    size = 1e-3 / slope.sqrt()
    values = []
    for step in (size, -2 * size, size):
        policy.reshard_all()
        with torch.no_grad():
            for name in names:
                policy.get_parameter(name)._local_tensor.add_(grads[name], alpha=step.item())
        values.append((passed(policy, routers, others)[0] * advantages).double().sum())
    found = (values[0] - values[1]) / (2 * size)
    torch.testing.assert_close(found, slope.double(), rtol=0.05, atol=1e-3)


def flipping(
    path: str, replay: RouterReplay, **changes: object
) -> tuple[list[Choices], Sequence[dict[str, Tensor]]]:
    """Return the choices of an update's proximal pass and last pass, and its gradients; its first
    step changes many choices.
    """
    learner = make_learner(path, lr=0.1, router_replay=replay, **changes)
    routers = learner._routers if replay is RouterReplay.learner else Routers(learner._policy)
    seen: list[Choices] = []
    learner._policy.register_forward_hook(lambda *_: seen.append(routers.last_choices()))
    examples = examples_of(8)
    with gradients_seen(learner._policy) as grads:
        learner.update([pack_minibatch([examples[:4]]), pack_minibatch([examples[4:]])])
    assert len(seen) == 3, "a proximal pass and one for each minibatch"
    return [seen[0], seen[2]], grads


def test_a_later_minibatch_repeats_the_experts_of_its_proximal_pass(qwen):
    """Fails when the setting does nothing, or another row's choices are repeated."""
    (before, after), _ = flipping(qwen, RouterReplay.none)
    changed = [(a != b).any(dim=-1).float().mean() for a, b in zip(before, after, strict=True)]
    assert min(changed) > 0.05, "the test needs a step that changes experts"
    (before, after), _ = flipping(qwen, RouterReplay.learner)
    assert len(before) == len(changed)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def test_recomputed_activations_have_the_repeated_experts(qwen):
    """Fails when the backward pass chooses anew: its gradients would be another function's."""
    _, kept = flipping(qwen, RouterReplay.learner)
    _, recomputed = flipping(qwen, RouterReplay.learner, activation_checkpointing=True)
    for step, again in zip(kept, recomputed, strict=True):
        for name, grad in step.items():
            torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_nothing_is_repeated_after_an_update(qwen):
    learner = make_learner(qwen, lr=0.1, router_replay=RouterReplay.learner)
    examples = make_examples(qwen, noise=0.3, age=1)
    learner.update([pack_minibatch([examples[:3]]), pack_minibatch([examples[3:]])])
    learner.logprobs(pack(examples, total=1))  # more tokens: the choices would not fit them


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v2", "gpt_oss", "phimoe"])
def test_a_model_without_a_known_router_is_known_from_its_configuration(model_type, tmp_path):
    """It has none, weighs some experts with 0, cannot be trained here, or chooses otherwise."""
    tiny_config(model_type).save_pretrained(tmp_path)
    sizes = model_sizes(str(tmp_path), NO_ADAPTERS)
    assert not sizes.has_known_routers
