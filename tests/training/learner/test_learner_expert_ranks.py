"""A mixture of experts on two ranks gives the results of one rank.

The number of experts is not divisible by the ranks, no token of a rank reaches some experts, and
the ranks hold one copy of the weights or two.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import results_of_ranks
from learner_setup import (
    group_of_one,
    learner_logprobs,
    make_examples,
    make_learner,
    num_tokens,
    pack,
)
from safetensors.torch import load_file
from tiny_models import write_tiny_qwen3_moe

from april_rl.config.choices import RouterReplay

pytestmark = pytest.mark.slow

NUM_RANKS = 2
NUM_EXPERTS = 5  # three experts on one rank and two on the other
SHARD_SIZES = (2, 1)  # one copy of the weights, or two
DEALT = {
    1: [[[0, 1, 2, 3, 4, 5]]],
    2: [[[0, 2, 3], [4, 5]], [[1], []]],
}  # [1]: one token


def run(path: str, *, shard_size: int) -> dict[str, Any]:
    learner = make_learner(path, shard_size=shard_size)
    loaded = dict(learner.weights())
    examples = make_examples(path, noise=0.3, age=1)
    bins = DEALT[dist.get_world_size()][dist.get_rank()]
    total = num_tokens([examples])
    learner.update([[pack([examples[i] for i in bin_], total=total) for bin_ in bins]])
    learner.export(Path(path, f"exported{dist.get_world_size()}-{shard_size}"))
    return {
        "loaded": loaded,
        "sent": dict(learner.weights()),
        "logprobs": learner_logprobs(learner, examples),
        "repeated": repeat(path, shard_size=shard_size),
    }


def repeat(path: str, *, shard_size: int) -> torch.Tensor:
    """Return the log-probabilities after an update whose second minibatch uses the experts of its
    proximal pass.
    """
    learner = make_learner(
        path,
        shard_size=shard_size,
        router_replay=RouterReplay.learner,
        activation_checkpointing=True,
    )
    seen = []
    learner._policy.register_forward_hook(lambda *_: seen.append(learner._routers.last_choices()))
    examples = make_examples(path, noise=0.3, age=1)
    bins = DEALT[dist.get_world_size()][dist.get_rank()]
    rows = [pack([examples[i] for i in bin_], total=num_tokens([examples])) for bin_ in bins]
    learner.update([rows, rows])
    for before, after in zip(seen[: len(rows)], seen[-len(rows) :], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return learner_logprobs(learner, examples)


def run_all(_: int, folder: str) -> dict[int, dict[str, Any]]:
    return {size: run(f"{folder}/model", shard_size=size) for size in SHARD_SIZES}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Return the model folder, the results of one rank, and the results of each of two ranks by
    shard size.
    """
    folder = tmp_path_factory.mktemp("experts")
    write_tiny_qwen3_moe(folder / "model", num_experts=NUM_EXPERTS)
    ranks = results_of_ranks(run_all, folder, num_ranks=NUM_RANKS)
    with group_of_one():
        one = run(str(folder / "model"), shard_size=1)
    return folder / "model", one, ranks


@pytest.mark.parametrize("shard_size", SHARD_SIZES)
def test_two_ranks_load_and_update_experts_like_one_rank(seen, shard_size):
    """Fails when a rank loads the experts of another rank, or leaves its share out of an expert's
    gradient. A rank whose two tokens reach few experts must neither wait nor make others wait.
    """
    folder, one, ranks = seen
    stored = load_file(folder / "model.safetensors")
    for rank in ranks:
        loaded, sent = rank[shard_size]["loaded"], rank[shard_size]["sent"]
        assert loaded.keys() == stored.keys() == sent.keys()
        assert all(torch.equal(loaded[name], stored[name]) for name in stored)
        for name in stored:
            torch.testing.assert_close(sent[name], one["sent"][name], atol=1e-4, rtol=1e-2)
        logprobs = rank[shard_size]["logprobs"]
        torch.testing.assert_close(logprobs, one["logprobs"], atol=2e-4, rtol=1e-4)
    changed = {n for n in stored if not torch.equal(one["sent"][n], stored[n])}
    assert changed == one["sent"].keys(), "the update must move every expert"


@pytest.mark.parametrize("shard_size", SHARD_SIZES)
def test_an_export_of_two_ranks_equals_the_weights_they_send(seen, shard_size):
    folder, _, ranks = seen
    exported = load_file(folder / f"exported2-{shard_size}" / "model.safetensors")
    for rank in ranks:
        sent = rank[shard_size]["sent"]
        assert exported.keys() == sent.keys()
        assert all(torch.equal(exported[name], sent[name]) for name in sent)


@pytest.mark.parametrize("shard_size", SHARD_SIZES)
def test_two_ranks_repeat_the_expert_choices_of_their_rows_like_one_rank(seen, shard_size):
    _, one, ranks = seen
    for rank in ranks:
        found = rank[shard_size]["repeated"]
        torch.testing.assert_close(found, one["repeated"], atol=2e-3, rtol=1e-3)
    assert not torch.equal(one["repeated"], one["logprobs"])
