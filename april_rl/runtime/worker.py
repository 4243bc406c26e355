"""One worker: an FSDP2 rank and an engine in the same process, driven by the controller. Runs as a
Ray actor.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from april_rl.metrics import Max, Metrics
from april_rl.runtime.settings import WorkerSettings
from april_rl.types import Completion, Request, Tick

if TYPE_CHECKING:
    from april_rl.batch.packing import MicroBatch

# torch, transformers and vllm are imported where the worker is built: the controller imports this
# module too, to name the actor's class, and must stay light.


class Worker:
    """Rank `rank` of `world_size`; methods run one after another, in the order the controller calls
    them.
    """

    def __init__(self, *, rank: int, world_size: int, settings: WorkerSettings) -> None:
        """Notes who it is; the parts are built when the controller asks for them."""
        self._rank, self._world_size, self._settings = rank, world_size, settings

    def address(self) -> tuple[str, int]:
        """Host and a free port of this worker's machine, for the process group."""
        host = socket.gethostbyname(socket.gethostname()) if self._world_size > 1 else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, int(probe.getsockname()[1])

    def join(self, address: tuple[str, int]) -> None:
        """Become rank `rank` of the process group that meets at `address`."""
        import torch
        import torch.distributed as dist

        host, port = address
        os.environ.update(
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            RANK=str(self._rank),
            LOCAL_RANK="0",
            WORLD_SIZE=str(self._world_size),
        )
        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)
        backend = "cuda:nccl,cpu:gloo" if self._settings.device == "cuda" else "gloo"
        if self._world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            dist.init_process_group(
                backend,
                init_method=f"tcp://{host}:{port}",
                rank=self._rank,
                world_size=self._world_size,
            )

    def build_learner(self) -> int:
        """Load this rank's shard of the model; returns the number of parameters of the whole."""
        from april_rl.learner.learner import Learner
        from april_rl.learner.objective import Objective

        self._learner = Learner(
            device=self._settings.device,
            objective=Objective(**asdict(self._settings.objective)),
            **asdict(self._settings.learner),
        )
        return self._learner.num_parameters

    def build_engine(self) -> None:
        """Start vLLM on the same device."""
        from april_rl.engine.vllm_engine import VllmEngine

        self._engine = VllmEngine(**asdict(self._settings.engine))

    def kv_cache_tokens(self) -> int:
        """Tokens whose keys and values fit the engine's cache."""
        return self._engine.kv_cache_tokens

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """One tick of the engine."""
        return self._engine.advance(submit, slots=slots, max_steps=max_steps)

    def abort(self) -> list[Completion]:
        """Everything the engine still holds; it is empty afterwards."""
        return self._engine.abort()

    def update(self, minibatches: Sequence[Sequence[MicroBatch]]) -> Metrics:
        """Forward, backward, optimizer: one step per minibatch, while the engine sleeps."""
        self._engine.sleep()
        started = time.perf_counter()
        metrics = self._learner.update(minibatches)
        return Metrics({**metrics, "time/update_s": Max(time.perf_counter() - started)})

    def sync_weights(self, policy_version: int) -> Metrics:
        """Stream the learner's weights into the engine, tensor by tensor; the engine samples with
        them from now on.
        """
        started = time.perf_counter()
        self._engine.wake_weights()
        self._engine.load_weights(self._learner.weights(), policy_version=policy_version)
        self._engine.wake_kv_cache()
        return Metrics({"time/weight_sync_s": Max(time.perf_counter() - started)})

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder (rank 0 writes, every rank gathers)."""
        self._learner.export(path)
