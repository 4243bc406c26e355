"""A run in one process (runtime.ray=false): the worker's methods are called directly.

For a debugger, a notebook and a first look. No watchdog ends a call that hangs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

from april_rl.run.checkpointing.checkpointer import Written
from april_rl.run.supervision.host_memory import allocator_environment
from april_rl.training.rollout.in_process import SerialEngines
from april_rl.training.runtime.layout import Layout
from april_rl.training.runtime.worker import Worker
from april_rl.training.runtime.worker_parts import WorkerSettings
from april_rl.training.runtime.workers import Workers


class LocalWorker(Workers):
    """The only worker of a run, in this process."""

    def __init__(self, layout: Layout, *, settings: WorkerSettings) -> None:
        assert layout.num_workers == 1, layout
        if layout.device == "cuda":  # as a worker on Ray; torch reads it at the first allocation
            os.environ.update(allocator_environment(os.environ))
        super().__init__(layout, settings)
        self.worker = Worker(settings)

    def engines(self, *, deterministic: bool) -> SerialEngines:  # noqa: ARG002 (one always is)
        """Return the engine as the collector drives it, with the samples of a run with Ray."""
        return SerialEngines([self.worker.engine], computes_launched=True)

    def poll_save(self) -> Written | None:
        return self.worker.poll_save()

    def close(self) -> None:
        """Free the model and leave the process group, so that another run can follow."""
        self.worker.close()
        gc.collect()

    def _join(self) -> None:
        address = self.worker.listen(1)
        timeout_s = self._settings.config.runtime.stall_timeout_s
        self.worker.join(address, rank=0, world_size=1, timeout_s=timeout_s)

    def _all(self, method: str, *args: object, **keywords: object) -> list[Any]:
        return [getattr(self.worker, method)(*args, **keywords)]

    def _each(self, method: str, argument_of: Callable[[int], object]) -> list[Any]:
        return self._all(method, argument_of(0))
