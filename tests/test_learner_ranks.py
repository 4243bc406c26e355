"""Two ranks against one: the same update, the same weights, whatever each rank has to compute; with
a frozen reference and a mask over responses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from learner_setup import (
    Example,
    group_of_one,
    learner_logprobs,
    make_examples,
    make_learner,
    num_tokens,
    pack,
    plain_model,
    write_model,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from april_rl.learner.mismatch import MismatchError
from april_rl.metrics import merge

NUM_RANKS, NUM_STEPS = 2, 3
MODELS = {"tied": True, "untied": False}
NUM_ON_FIRST_RANK = 5  # of six examples: rank 1 has one, and the dummy row


def batch(examples: Sequence[Example], *, rank: int | None) -> list[Any]:
    """Two micro-batches for `rank`, or everything as one row for None."""
    total = num_tokens([examples])
    if rank is None:
        return [pack(examples, total=total)]
    first, second = examples[:NUM_ON_FIRST_RANK], examples[NUM_ON_FIRST_RANK:]
    bins = [first[:2], first[2:]] if rank == 0 else [second, []]
    return [pack(bin_, total=total) for bin_ in bins]


def run(path: str, *, rank: int | None) -> dict[str, Any]:
    """What a rank, or a world of one, sees of a few updates."""
    learner = make_learner(path, kl="k3", kl_coefficient=0.1, geometric_mask=[0.9, 1.07])
    loaded = dict(learner.weights())
    metrics = []
    for seed in range(NUM_STEPS):
        examples = make_examples(path, noise=0.3, age=1, seed=seed)
        metrics.append(learner.update([batch(examples, rank=rank)]))
    logprobs = learner_logprobs(learner, make_examples(path, noise=0.0, age=0))
    sent = dict(learner.weights())
    if rank is not None:
        learner.export(Path(path, "exported"))
    fresh = make_examples(path, noise=1.0, age=0)
    error = ""
    try:
        learner.update([batch(fresh, rank=rank)])
    except MismatchError as raised:
        error = str(raised)
    return {
        "loaded": loaded,
        "sent": sent,
        "metrics": metrics,
        "logprobs": logprobs,
        "error": error,
        "num_parameters": learner.num_parameters,
    }


def run_rank(rank: int, folder: str) -> None:
    """One of the processes: leaves what it saw in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    seen = {name: run(f"{folder}/{name}", rank=rank) for name in MODELS}
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """[world of one, rank 0, rank 1], each by model; and where the models are."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, tied in MODELS.items():
        write_model(folder / name, tied=tied)
    torch.multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=NUM_RANKS)
    with group_of_one():
        one = {name: run(str(folder / name), rank=None) for name in MODELS}
    ranks = [torch.load(folder / f"rank{i}.pt", weights_only=False) for i in range(NUM_RANKS)]
    return folder, one, ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_uneven_ranks_make_the_update_of_one(seen, name):
    _, one, ranks = seen
    expected = one[name]["logprobs"]
    for rank in ranks:
        torch.testing.assert_close(rank[name]["logprobs"], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_metrics_merged_over_ranks_are_those_of_one(seen, name):
    _, one, ranks = seen
    for step in range(NUM_STEPS):
        merged = merge(rank[name]["metrics"][step] for rank in ranks).read()
        assert merged == pytest.approx(one[name]["metrics"][step].read(), rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_loads_its_slices_and_sends_whole_weights(seen, name):
    folder, one, ranks = seen
    stored = load_file(folder / name / "model.safetensors")
    for rank in ranks:
        assert rank[name]["loaded"].keys() == stored.keys()
        assert all(torch.equal(rank[name]["loaded"][key], stored[key]) for key in stored)
        assert rank[name]["num_parameters"] == one[name]["num_parameters"]
    first, second = (rank[name]["sent"] for rank in ranks)
    assert all(torch.equal(first[key], second[key]) for key in stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_export_of_two_ranks_is_what_they_send(seen, name):
    folder, _, ranks = seen
    model = AutoModelForCausalLM.from_pretrained(folder / name / "exported")
    assert (
        dict(model.named_parameters()).keys()
        == dict(plain_model(str(folder / name)).named_parameters()).keys()
    )
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, ranks[0][name]["sent"][key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_mismatch_is_judged_over_all_ranks(seen, name):
    _, one, ranks = seen
    assert "learner.max_mismatch = 0.05" in one[name]["error"]
    for rank in ranks:
        assert "over 161 tokens" in rank[name]["error"]
