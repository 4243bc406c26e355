"""The workers as Ray actors: where they are placed, how they start, and how the controller drives
them together.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from april_rl.batch.packing import Batch
from april_rl.errors import RunError
from april_rl.metrics import Metrics, merge
from april_rl.rollout.ports import EngineStalledError
from april_rl.runtime.settings import WorkerSettings
from april_rl.runtime.threads import thread_environment
from april_rl.runtime.worker import Worker
from april_rl.types import Completion, Request, Tick

T = TypeVar("T")
_MIB = 1 << 20
# Batches and completions pass through the object store; weights never do.
_OBJECT_STORE_BYTES = 256 * _MIB
_PLACEMENT_TIMEOUT_S = 120.0


class WorkerDiedError(RunError):
    """A worker failed; the message holds its own traceback."""


def start_ray(*, num_workers: int, address: str | None) -> None:
    """Join the cluster at `address`, or start Ray embedded here: offline, no dashboard."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray hides GPUs from actors that ask for none; the controller must not do more than that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    connect = partial(
        ray.init, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True
    )
    if address is not None:
        try:
            connect(address=address)
        except (RayError, ConnectionError, RuntimeError) as error:
            raise RunError(
                f"runtime.ray_address={address}: no Ray cluster answers ({error})"
            ) from error
        return
    connect(
        address="local",  # otherwise Ray would follow RAY_ADDRESS, and refuse the rest
        num_cpus=max(num_workers, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


class Workers:
    """All workers of the run. Owner of their processes: `close` leaves none behind."""

    def __init__(self, *, num_workers: int, settings: WorkerSettings, address: str | None) -> None:
        """Start Ray and place an actor per GPU or CPU slot; `start` loads what they need."""
        start_ray(num_workers=num_workers, address=address)
        self._num_workers = num_workers
        self._group = _place(num_workers, use_gpu=settings.device == "cuda")
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
        address = _get([self.actors[0].address.remote()])[0]
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
        return merge(_get(calls))

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
        return _get([getattr(actor, method).remote(*args) for actor in self.actors])


class RayEngines:
    """`rollout.ports.Engines` over the workers' engines."""

    def __init__(self, workers: Workers, *, deterministic: bool) -> None:
        """`deterministic`: `wait` waits for a tick of every engine that has one."""
        self._actors = workers.actors
        self._deterministic = deterministic
        self._ticks: list[deque[ray.ObjectRef[Tick]]] = [deque() for _ in self._actors]

    @property
    def num_engines(self) -> int:
        """One a worker."""
        return len(self._actors)

    def launch(self, engine: int, submit: Sequence[Request], *, slots: int, max_steps: int) -> None:
        """Queue a tick behind the one that runs."""
        call = self._actors[engine].advance.remote(submit, slots=slots, max_steps=max_steps)
        self._ticks[engine].append(call)

    def wait(self, timeout_s: float) -> list[tuple[int, Tick]]:
        """The oldest tick of every engine whose oldest tick has ended; waits for at least one.

        Raises EngineStalledError after `timeout_s`, WorkerDiedError or the worker's own error when
        one failed.
        """
        heads = {ticks[0]: engine for engine, ticks in enumerate(self._ticks) if ticks}
        wanted = len(heads) if self._deterministic else 1
        ended, waiting = ray.wait(list(heads), num_returns=wanted, timeout=timeout_s)
        if len(ended) < wanted:
            raise EngineStalledError(
                f"engine {heads[waiting[0]]} has not answered for {timeout_s:g} s (a tick of "
                "rollout.tick_steps engine steps); its worker hangs"
            )
        if waiting:
            ended += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        engines = sorted(heads[ref] for ref in ended)
        return list(zip(engines, _get([self._ticks[e].popleft() for e in engines]), strict=True))

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        """What ticks under way still bring, then what each engine gives back; stalled engines give
        nothing.
        """
        deadline = time.monotonic() + timeout_s
        calls = [actor.abort.remote() for actor in self._actors]
        completions: list[Completion] = []
        stalled: list[int] = []
        for engine, (ticks, call) in enumerate(zip(self._ticks, calls, strict=True)):
            refs = [*ticks, call]
            left_s = max(0.0, deadline - time.monotonic())
            ended, _ = ray.wait(refs, num_returns=len(refs), timeout=left_s)
            ticks.clear()
            if len(ended) < len(refs):
                stalled.append(engine)
                continue
            *reports, rest = _get(refs)
            completions += [c for tick in reports for c in tick.finished]
            completions += rest
        return completions, stalled


def _place(num_workers: int, *, use_gpu: bool) -> PlacementGroup:
    """A bundle a worker, on as few nodes as they fit on."""
    bundle = {"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0}
    group: PlacementGroup = placement_group([bundle] * num_workers, strategy="PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        have = ray.cluster_resources()  # type: ignore[no-untyped-call]
        raise RunError(
            f"runtime.num_workers={num_workers} wants {num_workers} times {bundle}, the "
            f"Ray cluster has { {k: have.get(k, 0.0) for k in bundle} }"
        )
    return group


def _get(calls: Sequence[ray.ObjectRef[T]]) -> list[T]:
    """The results, in order; a RunError of a worker as it is, any other failure as WorkerDiedError.

    The first failure counts, whichever rank it comes from: the others may wait for that rank for
    ever.
    """
    waiting = list(calls)
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1)
        try:
            ray.get(ended)
        except RayTaskError as error:
            if isinstance(error.cause, RunError):
                raise error.cause from None
            raise WorkerDiedError(f"worker failed:\n{error}") from None
        except RayActorError as error:
            raise WorkerDiedError(f"a worker process died: {error}") from None
    return list(ray.get(list(calls)))
