"""The workers as Ray actors: how they start, and how the controller drives them together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from april_rl.batch.packing import Batch
from april_rl.metrics import Metrics, merge
from april_rl.runtime.calls import results
from april_rl.runtime.cluster import place, start_ray
from april_rl.runtime.settings import WorkerSettings
from april_rl.runtime.threads import thread_environment
from april_rl.runtime.worker import Worker


class Workers:
    """All workers of the run. Owner of their processes: `close` leaves none behind."""

    def __init__(self, *, num_workers: int, settings: WorkerSettings, address: str | None) -> None:
        """Start Ray and place an actor per GPU or CPU slot; `start` loads what they need."""
        start_ray(num_workers=num_workers, address=address)
        self._num_workers = num_workers
        self._group = place(num_workers, use_gpu=settings.device == "cuda")
        env = {"TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if settings.threads:
            env |= thread_environment(settings.threads)
        actor = ray.remote(Worker)
        self.actors: list[Any] = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if settings.device == "cuda" else 0,
                max_restarts=0,
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            ).remote(rank=rank, world_size=num_workers, settings=settings)
            for rank in range(num_workers)
        ]

    def start(self, on_stage: Callable[[str], None]) -> int:
        """Form the process group, load the learner, start the engines; returns the number of
        parameters.

        Raises WorkerDiedError, or the RunError a worker raised.
        """
        on_stage("joining the process group")
        address = results([self.actors[0].address.remote()])[0]
        self._all("join", address)
        on_stage("loading the learner")
        num_parameters = self._all("build_learner")[0]
        on_stage("starting vLLM")
        self._all("build_engine")
        return int(num_parameters)

    def kv_cache_tokens(self) -> int:
        """Tokens whose keys and values fit the caches of all engines, once they are started."""
        return sum(self._all("kv_cache_tokens"))

    def update(self, batch: Batch) -> Metrics:
        """One optimizer step per minibatch on every worker; metrics of all ranks merged."""
        calls = [actor.update.remote(batch.of_rank(rank)) for rank, actor in enumerate(self.actors)]
        return merge(results(calls))

    def sync_weights(self, policy_version: int) -> Metrics:
        """The learner's weights into every engine, which then samples as `policy_version`."""
        return merge(self._all("sync_weights", policy_version))

    def export(self, path: Path) -> None:
        """A Hugging Face folder of the policy."""
        self._all("export", path)

    def close(self) -> None:
        """End every worker, and Ray if it was started here. Never waits for a worker."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)
        ray.shutdown()

    def _all(self, method: str, *args: object) -> list[Any]:
        return results([getattr(actor, method).remote(*args) for actor in self.actors])
