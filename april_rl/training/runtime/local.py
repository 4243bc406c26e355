"""A run in one process (runtime.ray=false): the worker's methods are called directly.

For a debugger, a notebook and a first look. No watchdog ends a call that hangs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.metrics import Metrics, merge
from april_rl.run.checkpointing.checkpointer import Written
from april_rl.run.supervision.host_memory import WorkerMemory, allocator_environment
from april_rl.training.batch.packing import Batch
from april_rl.training.rollout.in_process import SerialEngines
from april_rl.training.runtime.layout import Layout
from april_rl.training.runtime.weight_sync import sends_adapter
from april_rl.training.runtime.worker import Worker
from april_rl.training.runtime.worker_parts import WorkerSettings


class LocalWorker:
    """The only worker of a run, in this process; it has the methods of `Workers`."""

    has_failed = False  # as long as this process lives, it can be called

    def __init__(self, layout: Layout, *, settings: WorkerSettings) -> None:
        assert layout.num_workers == 1, layout
        if layout.device == "cuda":  # as a worker on Ray; torch reads it at the first allocation
            os.environ.update(allocator_environment(os.environ))
        self.layout, self.policy_version = layout, 0
        self._settings = settings
        self._worker = Worker(settings)

    def engines(self, *, deterministic: bool) -> SerialEngines:  # noqa: ARG002 (one always is)
        """Return the engine as the collector drives it, with the samples of a run with Ray."""
        return SerialEngines([self._worker.engine], computes_launched=True)

    def start(self, config: TrainConfig, *, sleeps: bool, on_stage: Callable[[str], None]) -> None:
        """Load the learner and start the engine as planned."""
        self._join()
        on_stage("loading the learner")
        self._worker.build_learner(config.learner)
        on_stage("starting vLLM")
        keeps_parked = config.rollout.resume.keeps_caches
        self._worker.build_engine(config.engine, sleeps=sleeps, keeps_parked=keeps_parked)
        if sends_adapter(self._settings.config.lora):
            self._worker.load_first_adapter()

    def start_engines(self) -> None:
        """Start the engine with the model's own weights, without a learner."""
        self._join()
        engine = self._settings.config.engine
        self._worker.build_engine(engine, sleeps=False, keeps_parked=False)

    def memory(self) -> list[WorkerMemory]:
        return [self._worker.memory()]

    def kv_cache_tokens(self) -> int:
        return self._worker.kv_cache_tokens()

    def update(self, batch: Batch) -> Metrics:
        return merge([self._worker.update(batch.of_rank(0))])

    def sync_weights(self, policy_version: int) -> Metrics:
        """Load the learner's weights into the engine, which then samples as `policy_version`."""
        metrics = merge([self._worker.sync_weights(policy_version)])
        self.policy_version = policy_version
        return metrics

    def export(self, path: Path) -> None:
        self._worker.export(path)

    def start_profile(self, folder: Path) -> None:
        self._worker.start_profile(folder)

    def write_profile(self) -> None:
        self._worker.write_profile()

    def start_saving(self, folder: Path) -> list[str]:
        return self._worker.start_saving(folder)

    def poll_save(self) -> Written | None:
        return self._worker.poll_save()

    def load_state(self, folder: Path) -> None:
        self._worker.load_state(folder)

    def close(self) -> None:
        """Free the model and leave the process group, so that another run can follow."""
        self._worker.close()
        gc.collect()

    def _join(self) -> None:
        address = self._worker.listen(1)
        timeout_s = self._settings.config.runtime.stall_timeout_s
        self._worker.join(address, rank=0, world_size=1, timeout_s=timeout_s)
