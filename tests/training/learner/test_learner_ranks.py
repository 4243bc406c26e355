"""Several ranks against plain torch and against one rank: gradients, updates and weights are the
same, no matter how weights are sharded and what each rank computes.
"""

from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from learner_setup import (
    TIS_CAP,
    all_plain_logprobs,
    group_of_one,
    num_tokens,
    plain_adamw,
    plain_model,
    plain_update,
)
from rank_worlds import (
    CASES,
    DEALT,
    MODELS,
    NOT_CLIPPED,
    NUM_RANKS,
    NUM_STEPS,
    RUNS,
    all_of,
    batch,
    record_gradients,
    run_rank,
    saved_examples,
    write_models,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from april_rl.metrics import merge

pytestmark = pytest.mark.slow
__all__ = ["batch"]


def plain_run(path: str) -> dict[str, Any]:
    model = plain_model(path)
    optimizer = plain_adamw(model)
    losses, norms = [], []
    with record_gradients(model) as gradients:
        for seed in range(NUM_STEPS):
            examples = saved_examples(path, seed)
            total = num_tokens([examples])
            behaviour = torch.cat([torch.from_numpy(e.behaviour_logprobs) for e in examples])
            weights = (all_plain_logprobs(model, examples) - behaviour).exp().clamp(max=TIS_CAP)
            advantages = torch.cat([torch.full((e.num_response,), e.advantage) for e in examples])
            losses.append(-(weights * advantages).sum().item() / total)  # every ratio is 1
            norms += plain_update(model, optimizer, [examples], max_grad_norm=NOT_CLIPPED)
    return {"losses": losses, "norms": norms, "gradients": gradients}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Return the model folders, the results of each rank by case or run, and the results of plain
    torch by model.
    """
    folder = tmp_path_factory.mktemp("ranks")
    write_models(folder)
    run_ranks(run_rank, str(folder), num_ranks=NUM_RANKS)
    with group_of_one():
        one = all_of(str(folder), RUNS[0][0], list(MODELS))
        plain = {name: plain_run(str(folder / name)) for name in MODELS}
    files = [[f"{name}2-rank{i}.pt" for i in range(2)] for name in MODELS]
    files.append([f"all4-rank{i}.pt" for i in range(NUM_RANKS)])
    found = {key: [value] for key, value in one.items()}
    for of_world in files:
        parts = [torch.load(folder / file, weights_only=False) for file in of_world]
        found |= {key: [part[key] for part in parts] for key in parts[0]}
    return folder, found, plain


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_plain_torch_and_one_rank(seen, case):
    """Every rank has the gradients of every parameter before each of three optimizer steps, up to
    the rounding of float32, since plain torch adds in another order. Fails when the loss is scaled
    by another number of ranks than gradients are averaged over, or a row is left out.
    """
    _, found, plain = seen
    [one] = found[case._replace(world=RUNS[0][0])]
    for rank in found[case]:
        for step, bound in enumerate([3e-6, 1e-5, 1e-5]):
            gradients = rank["gradients"][step]
            expected = plain[case.model]["gradients"][step]
            assert gradients.keys() == expected.keys()
            for name, grad in gradients.items():
                assert relative(grad, expected[name]) < bound, name
        for name, grad in rank["gradients"][0].items():
            assert relative(grad, one["gradients"][0][name]) < 1e-6, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_norms_of_three_updates_equal_plain_torch(seen, case):
    _, found, plain = seen
    for step in range(NUM_STEPS):
        merged = merge(rank["metrics"][step] for rank in found[case]).read()
        assert merged["loss/total"] == pytest.approx(plain[case.model]["losses"][step], rel=1e-6)
        assert merged["loss/grad_norm"] == pytest.approx(plain[case.model]["norms"][step], rel=2e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_activations_are_recomputed_where_they_are_not_kept(seen, case):
    """Fails when activation checkpointing is turned on and does nothing."""
    _, found, _ = seen
    num_micro_batches = len(DEALT[case.world.num_ranks][0])
    for rank in found[case]:
        assert rank["passes"] == NUM_STEPS * num_micro_batches * (1 + case.activation_checkpointing)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_sends_the_same_weights(seen, case):
    """Even where each copy of the weights makes its own optimizer steps. Fails when gradients are
    not summed over the copies.
    """
    _, found, _ = seen
    first, *others = (rank["sent"] for rank in found[case])
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("world", "name"), RUNS[2:], ids=str)
def test_a_run_on_several_ranks_equals_a_run_on_one(seen, world, name):
    """With a frozen reference and a mask over responses. Compares the log-probabilities at the end
    and the metrics merged over ranks.
    """
    _, found, _ = seen
    [one] = found[RUNS[0][0], name]
    ranks = found[world, name]
    for rank in ranks:
        torch.testing.assert_close(rank["logprobs"], one["logprobs"], atol=2e-4, rtol=1e-4)
    for step in range(NUM_STEPS):
        merged = merge(rank["metrics"][step] for rank in ranks).read()
        assert merged == pytest.approx(one["metrics"][step].read(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("world", "name"), RUNS, ids=str)
def test_every_rank_loads_its_slices_and_sends_whole_weights(seen, world, name):
    folder, found, _ = seen
    stored = load_file(folder / name / "model.safetensors")
    for rank in found[world, name]:
        assert rank["loaded"].keys() == stored.keys()
        assert all(torch.equal(rank["loaded"][key], stored[key]) for key in stored)


@pytest.mark.parametrize(("world", "name"), RUNS, ids=str)
def test_an_export_of_several_ranks_equals_the_weights_they_send(seen, world, name):
    folder, found, _ = seen
    model = AutoModelForCausalLM.from_pretrained(folder / name / f"exported-{world}")
    expected = dict(plain_model(str(folder / name)).named_parameters()).keys()
    assert dict(model.named_parameters()).keys() == expected
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, found[world, name][0]["sent"][key]), key


@pytest.mark.parametrize(("world", "name"), RUNS, ids=str)
def test_a_mismatch_is_judged_over_all_ranks(seen, world, name):
    _, found, _ = seen
    for rank in found[world, name]:
        assert "the limit is 5 times learner.max_mismatch=0.05" in rank["error"]
        assert "over 161 tokens" in rank["error"]
