"""Ranks of a learner, forked from one process that has imported everything."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing


def run_ranks(function: Callable[..., None], *args: Any, num_ranks: int) -> None:
    """Run `function(rank, *args)` in a process for each rank; raise when one of them fails."""
    _origin().submit(_fork, function, args, num_ranks).result()


def results_of_ranks(function: Callable[..., Any], folder: Path, *, num_ranks: int) -> list[Any]:
    """Return what `function(rank, str(folder))` returns on each rank of a process group."""
    run_ranks(_save_result, function, str(folder), num_ranks, num_ranks=num_ranks)
    files = [folder / f"rank{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(file, weights_only=False) for file in files]


def _save_result(rank: int, function: Callable[..., Any], folder: str, num_ranks: int) -> None:
    with one_of(num_ranks, rank=rank, folder=folder):
        torch.save(function(rank, folder), f"{folder}/rank{rank}.pt")


@cache
def _origin() -> ProcessPoolExecutor:
    """Start the process that ranks of all tests are forked from: it imports everything once, and
    starts no thread.
    """
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _fork(function: Callable[..., None], args: tuple[Any, ...], num_ranks: int) -> None:
    torch.multiprocessing.start_processes(
        function, args=args, nprocs=num_ranks, start_method="fork"
    )


@contextmanager
def one_of(num_ranks: int, *, rank: int, folder: str) -> Iterator[None]:
    """Run as one rank of a process group, on one thread, and end the process after the others have
    finished; `folder` is empty or used only by these ranks.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    yield
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still run when the interpreter ends
