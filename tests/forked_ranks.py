"""Ranks of a learner, forked from one process that has imported everything."""

from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def run_ranks(function: Callable[..., None], *args: Any, num_ranks: int) -> None:
    """Run `function(rank, *args)` in a process for each rank; raise when one of them fails."""
    torch.multiprocessing.spawn(_fork, args=(function, args, num_ranks))


def _fork(_: int, function: Callable[..., None], args: tuple[Any, ...], num_ranks: int) -> None:
    """Fork from a process that has imported everything and started no thread."""
    torch.multiprocessing.start_processes(
        function, args=args, nprocs=num_ranks, start_method="fork"
    )
