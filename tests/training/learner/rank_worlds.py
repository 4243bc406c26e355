"""The work of each rank in `test_learner_ranks`.

Four processes first form two worlds of two ranks, then one world of four, and write their results
to files.
"""

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from learner_setup import (
    ALGORITHM,
    Example,
    learner_logprobs,
    make_examples,
    make_learner,
    num_tokens,
    pack,
    record_gradients,
    write_model,
)

from april_rl.config.choices import Kl, Offload
from april_rl.training.batch.packing import MicroBatch
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.update_errors import MismatchError

NUM_RANKS, NUM_STEPS = 4, 3
MODELS = {"tied": True, "untied": False}
NOT_CLIPPED = 1e9
# Which of six examples are in the micro-batches of each rank: uneven, and for some ranks only the
# dummy row.
DEALT = {
    1: [[[0, 1, 2, 3, 4, 5]]],
    2: [[[0, 1], [2, 3, 4]], [[5], []]],
    4: [[[0, 1], [2]], [[3], [4]], [[5], []], [[], []]],
}


class World(NamedTuple):
    """A world: the number of its ranks, and how many of them share a copy of the weights."""

    num_ranks: int
    shard_size: int

    def __str__(self) -> str:
        return f"{self.num_ranks // self.shard_size}x{self.shard_size}"


class Case(NamedTuple):
    """A learner that makes three updates."""

    world: World
    model: str
    activation_checkpointing: bool
    keep_attention: bool

    def __str__(self) -> str:
        recomputes = "-checkpointing" if self.activation_checkpointing else ""
        keeps = "-attention kept" if self.keep_attention else ""
        return f"{self.world}-{self.model}{recomputes}{keeps}"


PAIRS = [World(2, 2), World(2, 1)]
WORLDS = [World(1, 1), *PAIRS, World(4, 4), World(4, 2)]
RECOMPUTING = [World(1, 1), World(2, 2)]
FLAGS = [(False, False), (True, False), (True, True)]  # of a case
# Four ranks have no tied embeddings, which no number of copies or shards treats in its own way.
CASES = [
    Case(world, model, *flags)
    for world in WORLDS
    for model in (["untied"] if world.num_ranks == NUM_RANKS else MODELS)
    for flags in (FLAGS if world in RECOMPUTING and model == "tied" else FLAGS[:1])
]
REPLICATED = World(4, 2)
# Whole runs with every feature of a learner, one of them with one rank for comparison.
RUNS = [(World(1, 1), "tied"), (World(1, 1), "untied"), (World(2, 2), "tied")]
RUNS += [(World(2, 2), "untied"), (REPLICATED, "untied")]


def write_models(folder: Path) -> None:
    """Write the models, and with them the examples of every update and of the mismatch after the
    updates.
    """
    for name, tied in MODELS.items():
        path = write_model(folder / name, tied=tied, num_layers=2)
        for seed in range(NUM_STEPS):
            save_examples(path, seed, make_examples(path, noise=0.3, age=1, seed=seed))
        save_examples(path, NUM_STEPS, make_examples(path, noise=1.0, age=0))


def save_examples(path: str, seed: int, examples: list[Example]) -> None:
    Path(path, f"examples{seed}.pkl").write_bytes(pickle.dumps(examples))


def saved_examples(path: str, seed: int) -> list[Example]:
    """Return the examples, of which every rank takes its part."""
    found: list[Example] = pickle.loads(Path(path, f"examples{seed}.pkl").read_bytes())
    return found


def batch(examples: Sequence[Example], *, rank: int, num_ranks: int = 2) -> list[MicroBatch]:
    total = num_tokens([examples])
    bins = DEALT[num_ranks][rank]
    return [pack([examples[i] for i in bin_], total=total) for bin_ in bins]


def own_batch(path: str, seed: int) -> list[MicroBatch]:
    examples = saved_examples(path, seed)
    return batch(examples, rank=dist.get_rank(), num_ranks=dist.get_world_size())


def train(path: str, case: Case) -> dict[str, Any]:
    """Train three updates on one rank; with copies of the weights, offload everything between the
    updates.
    """
    learner = make_learner(
        path,
        shard_size=case.world.shard_size,
        activation_checkpointing=case.activation_checkpointing,
        keep_attention=case.keep_attention,
        offload=Offload.all if case.world == REPLICATED else Offload.none,
        max_grad_norm=NOT_CLIPPED,
    )
    metrics, passes = [], []
    attention = learner._policy.get_submodule("model.layers.1.self_attn")
    attention.register_forward_hook(lambda *_: passes.append(1))
    with record_gradients(learner._policy) as gradients:
        for seed in range(NUM_STEPS):
            metrics.append(learner.update([own_batch(path, seed)]))
            learner.offload()
    sent = dict(learner.weights())
    return {"metrics": metrics, "gradients": gradients, "sent": sent, "passes": len(passes)}


def run(path: str, world: World) -> dict[str, Any]:
    """Run one rank with a frozen reference and a mask over responses; write a checkpoint and end
    with a mismatch.
    """
    algorithm = replace(ALGORITHM, kl=Kl.k3, kl_coefficient=0.1, geometric_mask=[0.9, 1.07])
    learner = make_learner(path, algorithm=algorithm, shard_size=world.shard_size)
    loaded = dict(learner.weights())
    metrics = [learner.update([own_batch(path, seed)]) for seed in range(NUM_STEPS)]
    logprobs = learner_logprobs(learner, saved_examples(path, 0))
    sent = dict(learner.weights())
    learner.export(Path(path, f"exported-{world}"))
    return {
        "loaded": loaded,
        "sent": sent,
        "metrics": metrics,
        "logprobs": logprobs,
        "error": mismatch_of(learner, own_batch(path, NUM_STEPS)),
    }


def mismatch_of(learner: Learner, micro_batches: list[MicroBatch]) -> str:
    with pytest.raises(MismatchError) as caught:
        learner.update([micro_batches])
    return str(caught.value)


def all_of(folder: str, world: World, models: Sequence[str]) -> dict[Any, Any]:
    cases = [case for case in CASES if case.world == world and case.model in models]
    seen: dict[Any, Any] = {case: train(f"{folder}/{case.model}", case) for case in cases}
    for name in models:
        if (world, name) in RUNS:
            seen[world, name] = run(f"{folder}/{name}", world)
    return seen


def run_rank(rank: int, folder: str) -> None:
    """Run one of four processes: first in two worlds of two ranks, then in one of four."""
    torch.set_num_threads(1)
    pair, models = (0, ["tied"]) if rank < 2 else (1, ["untied"])
    with group(f"{folder}/pair{pair}", rank=rank % 2, num_ranks=2):
        seen = {}
        for world in PAIRS:
            seen |= all_of(folder, world, models)
    torch.save(seen, f"{folder}/{models[0]}2-rank{rank % 2}.pt")
    with group(f"{folder}/all", rank=rank, num_ranks=NUM_RANKS):
        seen = {}
        for world in (World(4, 4), REPLICATED):
            seen |= all_of(folder, world, list(MODELS))
    torch.save(seen, f"{folder}/all4-rank{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # because gloo's threads may still run when the interpreter ends


@contextmanager
def group(store: str, *, rank: int, num_ranks: int) -> Iterator[None]:
    """Initialize `torch.distributed` with the processes that share the file `store`."""
    held = dist.FileStore(store, num_ranks)
    dist.init_process_group("gloo", store=held, rank=rank, world_size=num_ranks)
    yield
    dist.barrier()
    dist.destroy_process_group()
