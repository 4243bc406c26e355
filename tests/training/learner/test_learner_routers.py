"""Routers that repeat the expert choices of an earlier pass, in every family that the learner
knows.
"""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_setup import (
    CPU,
    NO_ADAPTERS,
    Example,
    build_policy,
    learner_logprobs,
    make_learner,
    pack,
    pack_minibatch,
    record_gradients,
)
from tiny_architectures import tiny_config, tiny_model
from tiny_models import write_tiny_qwen3_moe
from torch import Tensor

from april_rl.config.choices import RouterReplay
from april_rl.config.lora import LoraConfig
from april_rl.start.planning.model import read_model
from april_rl.training.batch.packing import MicroBatch
from april_rl.training.learner.model.architecture import empty_model
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.learner.model.routers import _CHOOSING_CALL, Choices, Routers
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow

# Each has its own class of router.
FAMILIES = (
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "olmoe", "flex_olmo"),
    *("granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa", "hunyuan_v1_moe"),
    *("mellum", "ernie4_5_moe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
    *("kimi_linear", "nemotron_h", "solar_open"),
)
# Two groups of two experts: repeated experts may be outside the best group.
GROUPS = {"n_group": 2, "topk_group": 1}
VOCABULARY = 98  # the lengths of `make_examples`

pytestmark = [
    pytest.mark.usefixtures("_group"),
    pytest.mark.filterwarnings("ignore"),  # transformers warns about tiny configurations
]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


def write(folder: Path, model_type: str) -> str:
    # One of four layers has linear attention, which is slow on a CPU.
    kimi = {"layer_types": ["linear_attention"] + 3 * ["full_attention"]}
    changes = {"deepseek_v3": GROUPS, "kimi_linear": kimi}.get(model_type, {})
    tiny_model(tiny_config(model_type, vocab_size=VOCABULARY, **changes)).save_pretrained(folder)
    return str(folder)


def examples_of(num: int = 2) -> list[Example]:
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


def run_forward(
    policy: Policy, routers: Routers, choices: Choices | None
) -> tuple[Tensor, dict[str, Tensor]]:
    row = PackedRow.of(pack(examples_of(), total=1), device=CPU)
    policy.zero_grad()
    with routers.repeating(choices):
        logprobs, _ = policy(row)
        (logprobs * row.credits).sum().backward()
    trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    grads = {n: p.grad.full_tensor().clone() for n, p in trained.items()}
    return logprobs.detach(), grads


def shift(choices: Choices, num_experts: int) -> Choices:
    return tuple((choice + 1) % num_experts for choice in choices)


def test_every_known_router_is_tried_in_one_family():
    found = []
    for model_type in FAMILIES:
        model = empty_model(tiny_config(model_type), dtype=torch.float32)
        names = {type(part).__name__ for part in model.modules()}
        found += names & _CHOOSING_CALL.keys()
    assert sorted(found) == sorted(_CHOOSING_CALL)


def test_the_page_names_exactly_the_known_families():
    text = (Path(__file__).parents[3] / "docs" / "usage.md").read_text(encoding="utf-8")
    (line,) = [one for one in text.splitlines() if one.strip().startswith("`deepseek_v3`")]
    paragraph = text[text.index(line) :].partition(".\n")[0]
    assert sorted(re.findall(r"`(\w+)`", paragraph)) == sorted({*FAMILIES, "qwen3_5_moe"})


def test_repeating_its_own_choice_is_bit_identical(path):
    """Also where a layer is recomputed; the other tests keep all activations."""
    policy = build_policy(path, activation_checkpointing=True)
    plain = run_forward(policy, Routers(), None)
    routers = Routers(policy)
    chosen = run_forward(policy, routers, None)
    repeated = run_forward(policy, routers, routers.last_choices())
    for logprobs, grads in (chosen, repeated):
        assert torch.equal(logprobs, plain[0])
        for name, grad in grads.items():
            assert torch.equal(grad, plain[1][name]), name


def test_the_order_of_the_experts_does_not_matter(path):
    """Fails when an expert gets the weight of another expert."""
    policy = build_policy(path)
    routers = Routers(policy)
    plain, grads = run_forward(policy, routers, None)
    turned = tuple(choice.flip(-1) for choice in routers.last_choices())
    logprobs, found = run_forward(policy, routers, turned)
    torch.testing.assert_close(logprobs, plain, atol=1e-5, rtol=1e-5)
    for name, grad in grads.items():
        assert (found[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-6, name


def test_other_choices_are_repeated_with_weights_and_gradients_of_their_scores(path):
    """Compared with finite differences along the routers' gradient. Fails when a weight belongs to
    another expert, or has no gradient; some routers' weights do not depend on all scores.
    """
    policy = build_policy(path, activation_checkpointing=True)
    routers = Routers(policy)
    own, _ = run_forward(policy, routers, None)
    others = shift(routers.last_choices(), num_experts=4)
    before, grads = run_forward(policy, routers, others)
    assert not torch.equal(before, own)
    for choice, other in zip(routers.last_choices(), others, strict=True):
        assert torch.equal(choice, other)
    known = [n for n, part in policy.named_modules() if type(part).__name__ in _CHOOSING_CALL]
    names = [n for n in grads if n.rpartition(".")[0].removesuffix(".wg") in known]
    assert len(names) == len(others)
    assert all(grads[name].any() for name in names)
    slope = sum(grads[name].square().sum() for name in names)
    advantages = PackedRow.of(pack(examples_of(), total=1), device=CPU).credits
    size = 1e-3 / slope.sqrt()
    values = []
    for step in (size, -2 * size, size):
        policy.reshard_all()
        with torch.no_grad():
            for name in names:
                policy.get_parameter(name)._local_tensor.add_(grads[name], alpha=step.item())
        values.append((run_forward(policy, routers, others)[0] * advantages).double().sum())
        assert all(map(torch.equal, routers.last_choices(), others))
    found = (values[0] - values[1]) / (2 * size)
    torch.testing.assert_close(found, slope.double(), rtol=0.05, atol=1e-3)


def two_minibatches() -> list[list[MicroBatch]]:
    examples = examples_of(8)
    return [
        pack_minibatch([[first], [second, third, fourth]])
        for first, second, third, fourth in (examples[:4], examples[4:])
    ]


def choices_of_update(path: str, replay: RouterReplay, **changes: Any) -> list[list[Choices]]:
    """Return the choices of the rows of an update's last minibatch, in its proximal pass and in its
    own pass; the first step changes many choices.
    """
    learner = make_learner(path, lr=0.1, router_replay=replay, **changes)
    routers = learner._routers if replay is RouterReplay.learner else Routers(learner._policy)
    seen: list[Choices] = []
    learner._policy.register_forward_hook(lambda *_: seen.append(routers.last_choices()))
    learner.update(two_minibatches())
    assert len(seen) == 6, "two rows of a proximal pass and of each minibatch"
    return [seen[:2], seen[4:]]


@pytest.mark.parametrize(
    "lora",
    [NO_ADAPTERS, LoraConfig(rank=4, alpha=256.0, target_modules=["q_proj", "v_proj"])],
    ids=["whole", "adapters"],
)
def test_a_later_minibatch_repeats_the_experts_of_its_proximal_pass(qwen, lora):
    """Fails when the setting does nothing, or the choices of another row are repeated."""
    before, after = choices_of_update(qwen, RouterReplay.none, lora=lora)
    for a, b in zip(chain(*before), chain(*after), strict=True):
        assert (a != b).any(dim=-1).float().mean() > 0.05, "the test needs changed experts"
    before, after = choices_of_update(qwen, RouterReplay.learner, lora=lora)
    assert all(map(torch.equal, chain(*before), chain(*after)))


def test_a_second_pass_repeats_the_experts_of_the_first_minibatch(qwen):
    """Its proximal pass is the one before the update. Fails when the minibatch's own first pass
    replaces it.
    """
    learner = make_learner(qwen, lr=0.1, router_replay=RouterReplay.learner, num_passes=2)
    seen: list[Choices] = []
    learner._policy.register_forward_hook(lambda *_: seen.append(learner._routers.last_choices()))
    learner.update(two_minibatches())
    assert len(seen) == 4 + 2 * 4, "two rows of each minibatch, beforehand and in each pass"
    for pass_of_both in (seen[4:8], seen[8:]):
        assert all(map(torch.equal, chain(*seen[:4]), chain(*pass_of_both)))


def with_experts(micro_batch: MicroBatch, *, seed: int) -> MicroBatch:
    """Return the row with two of six experts for each token and layer, but with no experts from the
    engine for every fifth token.
    """
    rng = np.random.default_rng(seed)
    size = len(micro_batch.token_ids)
    experts = rng.random((size, 3, 6)).argsort(axis=-1)[..., :2].astype(np.uint8)
    return replace(micro_batch, experts=experts, is_routed=np.arange(size) % 5 > 0)


@pytest.mark.parametrize("num_passes", [1, 2])
def test_every_pass_of_an_update_uses_the_experts_of_the_engine(tmp_path, num_passes):
    """The second of three layers has no experts. Fails when a layer or a token gets the experts of
    another one, or a token without reported experts does not use those of its proximal pass.
    """
    write_tiny_qwen3_moe(tmp_path)
    minibatches = [
        [with_experts(row, seed=10 * number + i) for i, row in enumerate(rows)]
        for number, rows in enumerate(two_minibatches())
    ]
    learner = make_learner(
        str(tmp_path), lr=0.1, router_replay=RouterReplay.engine, num_passes=num_passes
    )
    seen: list[Choices] = []
    learner._policy.register_forward_hook(lambda *_: seen.append(learner._routers.last_choices()))
    learner.update(minibatches)
    rows = list(chain(*minibatches))
    proximal = rows if num_passes > 1 else rows[2:]
    for row, choices in zip([*proximal, *num_passes * rows], seen, strict=True):
        for layer, choice in zip((0, 2), choices, strict=True):
            assert np.array_equal(choice[row.is_routed], row.experts[row.is_routed, layer])
    for before, after in zip(seen[: len(proximal)], seen[-len(proximal) :], strict=True):
        assert all(map(torch.equal, before, after))


def test_recomputed_activations_use_the_repeated_experts(qwen):
    """Fails when the backward pass chooses experts again: its gradients would belong to another
    function.
    """
    steps = []
    for is_recomputed in (False, True):
        learner = make_learner(
            qwen, lr=0.1, router_replay=RouterReplay.learner, activation_checkpointing=is_recomputed
        )
        with record_gradients(learner._policy) as grads:
            learner.update(two_minibatches())
        steps.append(grads)
    for step, again in zip(*steps, strict=True):
        for name, grad in step.items():
            torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_nothing_is_repeated_after_an_update(qwen):
    learner = make_learner(qwen, lr=0.1, router_replay=RouterReplay.learner)
    learner.update(two_minibatches())
    # More tokens than any earlier row, so that old choices would not fit.
    assert learner_logprobs(learner, examples_of(8)).isfinite().all()


def test_an_error_inside_the_block_ends_the_repetition(qwen):
    policy = build_policy(qwen)
    routers = Routers(policy)
    run_forward(policy, routers, None)
    with pytest.raises(ZeroDivisionError), routers.repeating(routers.last_choices()):
        raise ZeroDivisionError
    policy(PackedRow.of(pack(examples_of(8), total=1), device=CPU))


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v2", "gpt_oss", "phimoe"])
def test_a_model_without_a_known_router_is_recognised_by_its_configuration(model_type, tmp_path):
    """It has no router, gives some experts the weight 0, cannot be trained here, or chooses in
    another way.
    """
    tiny_config(model_type).save_pretrained(tmp_path)
    sizes = model_sizes(read_model(str(tmp_path)), NO_ADAPTERS)
    assert not sizes.has_known_routers
