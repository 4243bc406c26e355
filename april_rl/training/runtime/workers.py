"""All workers together: how they start, as Ray actors or in this process, and how the controller
calls them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from april_rl.config import TrainConfig
from april_rl.config.choices import LoraSync
from april_rl.metrics import Metrics, merge
from april_rl.run.checkpointing.checkpointer import Written
from april_rl.run.supervision.host_memory import WorkerMemory, allocator_environment
from april_rl.run.supervision.watchdog import Watchdog
from april_rl.training.batch.packing import Batch
from april_rl.training.rollout.in_process import SerialEngines
from april_rl.training.rollout.ports import Engines
from april_rl.training.runtime.cluster import Placement, rank_order, start_ray, stop_ray
from april_rl.training.runtime.engines import RayEngines
from april_rl.training.runtime.layout import Layout
from april_rl.training.runtime.process_setup import thread_environment
from april_rl.training.runtime.worker import Worker, WorkerActor
from april_rl.training.runtime.worker_parts import WorkerSettings


class Workers:
    """The workers of a run, as the controller calls them; subclasses know how calls reach them."""

    has_failed = False  # whether a worker is dead or hung, so that no call to it would return

    def __init__(self, layout: Layout, settings: WorkerSettings) -> None:
        self.layout, self._settings = layout, settings
        self.policy_version = 0  # version of the weights that were synced last

    def start(self, config: TrainConfig, *, sleeps: bool, on_stage: Callable[[str], None]) -> None:
        """Start learners and engines as planned; raise the errors of `Watchdog.results`."""
        on_stage("joining the process group")
        self._join()
        on_stage("loading the learner")
        self._all("build_learner", config.learner)
        on_stage("starting vLLM")
        keeps_parked = config.rollout.resume.keeps_caches
        self._all("build_engine", config.engine, sleeps=sleeps, keeps_parked=keeps_parked)
        if config.lora.sync is LoraSync.adapter:
            self._all("load_first_adapter")

    def start_engines(self) -> None:
        """Form the process group and start the engines with the model's own weights, without a
        learner, for a run that only samples. Raise the errors that `Watchdog.results` raises.
        """
        self._join()
        self._all("build_engine", self._settings.config.engine, sleeps=False, keeps_parked=False)

    def memory(self) -> list[WorkerMemory]:
        return self._all("memory")

    def kv_cache_tokens(self) -> int:
        """Return how many tokens fit the KV caches of all engines after their start."""
        return sum(self._all("kv_cache_tokens")[:: self.layout.tensor_parallel_size])

    def update(self, batch: Batch) -> Metrics:
        """Take one optimizer step per minibatch on every worker; return the merged metrics.

        Raises MismatchError with the weights unchanged, NonFiniteError with the weights from
        before the first minibatch that is not finite, and OwnFunctionError with the weights from
        before the first minibatch in which the user's loss failed.
        """
        return merge(self._each("update", batch.of_rank))

    def sync_weights(self, policy_version: int) -> Metrics:
        """Load the learner's weights into every engine, which then samples as `policy_version`."""
        metrics = merge(self._each("sync_weights", lambda _rank: policy_version))
        self.policy_version = policy_version
        return metrics

    def export(self, path: Path) -> None:
        self._all("export", path)

    def start_saving(self, folder: Path) -> list[str]:
        """Copy the learners' state, and begin to write it into `folder`, which must be shared if
        there are several machines. Return the names of the files that will be written.
        """
        return [name for names in self._all("start_saving", folder) for name in names]

    def load_state(self, folder: Path) -> None:
        self._all("load_state", folder)

    def start_profile(self, folder: Path) -> None:
        """Trace the calls of the first worker from now on, as `CallProfiler.start` does."""
        self._all("start_profile", folder)

    def write_profile(self) -> None:
        self._all("write_profile")

    def engines(self, *, deterministic: bool) -> Engines:
        """Return the engines as the collector drives them."""
        raise NotImplementedError

    def poll_save(self) -> Written | None:
        """Return what all workers have written; None while one is writing. Never waits."""
        raise NotImplementedError

    def close(self) -> None:
        """End or free the workers, without waiting for one."""
        raise NotImplementedError

    def _join(self) -> None:
        raise NotImplementedError

    def _all(self, method: str, *args: object, **keywords: object) -> list[Any]:
        """Return what a method of each worker returns, by rank."""
        raise NotImplementedError

    def _each(self, method: str, argument_of: Callable[[int], object]) -> list[Any]:
        """Do the same with an argument for each rank, in a call that may take long."""
        raise NotImplementedError


class RayWorkers(Workers):
    """Workers as Ray actors, and the owner of their processes: `close` leaves none behind."""

    def __init__(
        self,
        layout: Layout,
        *,
        settings: WorkerSettings,
        address: str | None,
        watchdog: Watchdog,
        batch_tokens: int = 0,
    ) -> None:
        """Start Ray and place an actor per GPU or CPU slot; `start` loads what they need."""
        super().__init__(layout, settings)
        self.watchdog = watchdog
        self._polls: list[Any] = []  # running calls that ask what has been written
        start_ray(num_workers=layout.num_workers, address=address, batch_tokens=batch_tokens)
        self._placement = Placement(
            num_workers=layout.num_workers,
            tensor_parallel_size=layout.tensor_parallel_size,
            use_gpu=layout.device == "cuda",
        )
        env = {"TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["PYTHONPATH"] = os.pathsep.join(_own_folders())  # for the user's own loss
        if settings.threads:
            env |= thread_environment(settings.threads)
        if layout.device == "cuda":
            env |= allocator_environment(os.environ)
        actor = ray.remote(WorkerActor)
        self.actors: list[Any] = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if layout.device == "cuda" else 0,
                max_restarts=0,
                runtime_env={"env_vars": env},
                scheduling_strategy=strategy,
            ).remote(settings)
            for strategy in self._placement.strategies()
        ]  # in the order of ranks, once they have started

    @property
    def has_failed(self) -> bool:  # type: ignore[override]
        return self.watchdog.has_failed

    def _join(self) -> None:
        self.actors = [self.actors[index] for index in rank_order(self._all("location"))]
        self.watchdog.watch(self.actors)
        world_size = len(self.actors)
        # The watchdog waits less: it names the worker at fault, which a collective does not.
        timeout_s = 2 * self.watchdog.call_timeout_s
        [address] = self.watchdog.results([self.actors[0].listen.remote(world_size)])
        self.watchdog.results(
            [
                actor.join.remote(address, rank=rank, world_size=world_size, timeout_s=timeout_s)
                for rank, actor in enumerate(self.actors)
            ]
        )

    def engines(self, *, deterministic: bool) -> RayEngines:
        return RayEngines(self, deterministic=deterministic)

    @property
    def engine_actors(self) -> list[list[Any]]:
        """Return the actors of each engine, first rank first."""
        size = self.layout.tensor_parallel_size
        return [self.actors[first : first + size] for first in range(0, len(self.actors), size)]

    def poll_save(self) -> Written | None:
        """Return what `Workers.poll_save` does."""
        self._polls = self._polls or [actor.poll_save.remote() for actor in self.actors]
        found = self.watchdog.results_within(self._polls, 0.0)
        if found is None:
            return None
        self._polls = []
        if None in found:
            return None
        records = {name: of for written in found for name, of in written.records.items()}
        errors = [written.error for written in found if written.error]
        return Written(records=records, error=errors[0] if errors else "")

    def close(self) -> None:
        """End every worker, and Ray if it was started here, without waiting for a worker."""
        try:
            self.watchdog.kill_workers()  # this also ends stopped workers, which Ray cannot end
            if ray.is_initialized():
                for actor in self.actors:  # the watchdog may not be watching them yet
                    ray.kill(actor, no_restart=True)
        finally:
            stop_ray()

    def _all(self, method: str, *args: object, **keywords: object) -> list[Any]:
        calls = [getattr(actor, method).remote(*args, **keywords) for actor in self.actors]
        return list(self.watchdog.results(calls))

    def _each(self, method: str, argument_of: Callable[[int], object]) -> list[Any]:
        calls = [
            getattr(actor, method).remote(argument_of(rank))
            for rank, actor in enumerate(self.actors)
        ]
        return list(self.watchdog.results(calls, reports_beats=True))


class LocalWorker(Workers):
    """The only worker of a run in one process (runtime.ray=false): its methods are called directly.

    For a debugger, a notebook and a first look. No watchdog ends a call that hangs.
    """

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


def _own_folders() -> list[str]:
    """Return the folders of `sys.path` that do not belong to Python or its packages."""
    python = (sys.prefix, sys.base_prefix)
    return [folder for folder in sys.path if folder and not folder.startswith(python)]
