"""Peak memory of a block of code, and new processes to measure it in."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_INTERVAL_S = 0.001
_STATUS = Path("/proc/self/status")


def in_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what `function` returns in a new process, whose memory holds nothing from before.

    Function, arguments and result are pickled; exceptions are raised here.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


class PeakMemory:
    """The most memory that a block of code used beyond what was in use at its start.

    On an accelerator this is torch's allocated memory. On CPU it is the anonymous resident memory
    of the process, sampled every millisecond, since the kernel records no peak of it.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare for `device`; measuring begins with the block."""
        self._device = device
        self._is_over = threading.Event()
        self.mib = 0.0  # once the block has been left

    def __enter__(self) -> PeakMemory:
        """Start from what is in use now."""
        gc.collect()
        if self._device.type == "cpu":
            self._start = self._highest = resident_mib()
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        else:
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
            self._start = torch.accelerator.memory_allocated() / 2**20
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note the growth."""
        if self._device.type == "cpu":
            self._is_over.set()
            self._watcher.join()
        else:
            torch.accelerator.synchronize()
            self._highest = torch.accelerator.max_memory_allocated() / 2**20
        self.mib = self._highest - self._start

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self._highest = max(self._highest, resident_mib())


def resident_mib() -> float:
    """Return the anonymous resident memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
    assert found is not None, "the kernel does not report RssAnon"
    return int(found[1]) / 1024
