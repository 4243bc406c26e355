"""A worker: an FSDP2 rank and an engine in one process, driven by the controller."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil
import ray

from april_rl.config.choices import LoraSync
from april_rl.config.engine import EngineConfig
from april_rl.config.schema import LearnerConfig
from april_rl.errors import ExportError
from april_rl.metrics import Max, Metrics
from april_rl.run.checkpointing.checkpointer import BackgroundWrite, Written
from april_rl.run.supervision.heartbeat import Heartbeat, WorkerProcess, records_activity
from april_rl.run.supervision.host_memory import WorkerMemory, host_memory
from april_rl.run.supervision.memory_usage import worker_memory
from april_rl.run.tracking.call_profiler import CallProfiler
from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.training.runtime.cluster import WorkerLocation
from april_rl.training.runtime.lockstep import Fingerprint, fingerprint
from april_rl.training.runtime.parked_tokens import ParkedTokens
from april_rl.training.runtime.process_setup import end_with_parent, unlink_shared_memory
from april_rl.training.runtime.weight_sync import send_adapter, send_weights
from april_rl.training.runtime.worker_parts import WorkerSettings, build_engine, build_learner

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from april_rl.training.batch.packing import MicroBatch
    from april_rl.training.engine.port import Engine

# torch, transformers and vllm are imported inside the methods that need them: the controller also
# imports this module, for the actor's class, and must stay light.


class Worker:
    """A rank of the learner and of an engine. Methods run one by one, in the order of the calls."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self.heartbeat = Heartbeat()
        self._profiler = CallProfiler(device=settings.device)
        self._closing = ExitStack()
        self._parked = ParkedTokens()

    def memory(self) -> WorkerMemory:
        """Return the memory of this worker's GPU and node, before anything is loaded."""
        device_bytes = free_bytes = 0
        if self._settings.device != "cpu":
            import torch

            free_bytes, device_bytes = torch.accelerator.get_memory_info()
        return WorkerMemory(
            node_id=self._node_id(),
            device_bytes=device_bytes,
            free_bytes=free_bytes,
            host_free_bytes=host_memory().free,
        )

    def listen(self, world_size: int) -> tuple[str, int]:
        """Start the store of a process group on rank 0, at a free port; return host and port."""
        import torch.distributed as dist

        self._store: Store = dist.HashStore()  # type: ignore[attr-defined]
        if world_size == 1:
            return "127.0.0.1", 0
        host = _node_ip()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, world_size, is_master=True, wait_for_workers=False
        )
        self._store = store
        return host, int(store.port)

    @records_activity
    def join(
        self, address: tuple[str, int], *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Join the process group at `address`, whose collectives fail after `timeout_s`."""
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        host, port = address
        os.environ.update(
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            RANK=str(rank),
            LOCAL_RANK="0",  # Ray shows each worker its own GPU
            WORLD_SIZE=str(world_size),
        )
        if world_size > 1:
            _use_network_of_ray()
        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)
        if rank > 0:
            self._store = dist.TCPStore(host, port, world_size, is_master=False)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=timeout_s)
        self._store.set_timeout(timeout)
        # FSDP and vLLM make their own process groups with torch's default timeout, which would end
        # a waiting worker after 10 or 30 minutes.
        distributed_c10d.default_pg_timeout = timeout
        distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
        backend = "cuda:nccl,cpu:gloo" if self._settings.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=self._store, rank=rank, world_size=world_size)

    @records_activity
    def build_learner(self, learner: LearnerConfig) -> None:
        """Load this rank's shard, write its first adapter, which is still zero, and offload it, so
        that the engine finds the memory free.
        """
        self.learner, self._update = build_learner(
            replace(self._settings.config, learner=learner),
            device=self._settings.device,
            on_forward=self.heartbeat.beat,
        )
        if self._settings.config.lora.sync is LoraSync.adapter:
            self._first_adapter = TemporaryDirectory(prefix="april_rl_adapter_")
            self.learner.write_adapter(Path(self._first_adapter.name))
        self.learner.offload()

    @records_activity
    def build_engine(self, engine: EngineConfig, *, sleeps: bool, keeps_parked: bool) -> None:
        """Start vLLM on the same device, as `worker_parts.build_engine` does."""
        self.engine: Engine = build_engine(
            self._settings, engine, sleeps=sleeps, keeps_parked=keeps_parked
        )
        self._closing.callback(lambda: self.engine.close())

    @records_activity
    def load_first_adapter(self) -> None:
        """Load the adapter that `build_learner` wrote, so that all samples begin with one. The
        learner stays on the host: an engine that has not slept yet leaves no room for it.
        """
        self.engine.load_adapter(Path(self._first_adapter.name), policy_version=0)
        self._first_adapter.cleanup()

    def kv_cache_tokens(self) -> int:
        return self.engine.kv_cache_tokens

    @records_activity
    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:
        """Run one tick of the engine."""
        with self._profiler.call("advance", is_tick=True):
            requests = self._parked.complete(submit).each()
            return self.engine.advance(requests, slots=slots, max_steps=max_steps)

    @records_activity
    def abort(self) -> Completions:
        """Stop all requests and return what they have; the engine is empty afterwards."""
        given_back = self.engine.abort()
        self._parked.park(given_back)
        return given_back

    def follow_advance(self, submit: Requests, *, slots: int, max_steps: int) -> Fingerprint:
        """Run the same tick as the engine's first rank; return enough to compare the two."""
        return fingerprint(self.advance(submit, slots=slots, max_steps=max_steps).finished)

    def follow_abort(self) -> Fingerprint:
        return fingerprint(self.abort())

    @records_activity
    def update(self, minibatches: Sequence[Sequence[MicroBatch]]) -> Metrics:
        """Take one optimizer step per minibatch while the engine sleeps, if it can."""
        with self._profiler.call("update"):
            self.engine.sleep()
            started = time.perf_counter()
            metrics = self._update(minibatches)
        return Metrics({**metrics, "time/update_s": Max(time.perf_counter() - started)})

    @records_activity
    def sync_weights(self, policy_version: int) -> Metrics:
        """Stream the learner's weights into the engine, which then samples as `policy_version`."""
        started = time.perf_counter()
        with self._profiler.call("sync_weights"):
            num_bytes = self._send_weights(policy_version)
        return Metrics(
            {
                "time/weight_sync_s": Max(time.perf_counter() - started),
                "sync/bytes": Max(num_bytes),
                **worker_memory(device=self._settings.device),
            }
        )

    @records_activity
    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder: every rank gathers, rank 0 writes.

        An engine that can sleep does so meanwhile and then gets its weights again. Beside a KV
        cache the export could run out of memory, at the end of a run.
        """
        self.engine.sleep()
        try:
            self.learner.export(path)
        except ExportError:  # every rank has reached the end of the export, so the run can continue
            self._send_weights(self.engine.policy_version)
            raise
        self._send_weights(self.engine.policy_version)

    @records_activity
    def start_profile(self, folder: Path) -> None:
        """Trace this worker's calls from now on, if it is the first one."""
        if os.environ["RANK"] == "0":
            self._profiler.start(folder)

    @records_activity
    def write_profile(self) -> None:
        self._profiler.write()

    @records_activity
    def start_saving(self, folder: Path) -> list[str]:
        """Copy the learner's state, which a thread then writes; return the names of the files."""
        snapshot = self.learner.snapshot()
        self._saving = BackgroundWrite(snapshot.write, folder)
        return snapshot.file_names

    def poll_save(self) -> Written | None:
        return self._saving.outcome()

    @records_activity
    def load_state(self, folder: Path) -> None:
        """Restore the learner from a checkpoint's files; a weight sync must follow."""
        self.engine.sleep()
        self.learner.load_state(folder)

    def close(self) -> None:
        """Free learner and engine, so that the process can make another worker."""
        import torch.distributed as dist

        self._closing.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _node_id(self) -> str:
        return ""

    def _send_weights(self, policy_version: int) -> int:
        self.engine.wake_weights()
        send = send_adapter if self._settings.config.lora.sync is LoraSync.adapter else send_weights
        num_bytes = send(self.learner, self.engine, self.heartbeat, version=policy_version)
        self.learner.offload()
        self.engine.wake_kv_cache()
        return num_bytes


class WorkerActor(Worker):
    """A worker as a Ray actor."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Keep the settings, and end when Ray's process on this node ends."""
        super().__init__(settings)
        end_with_parent()

    def process(self) -> WorkerProcess:
        return self.heartbeat.process(self._node_id())

    def location(self) -> WorkerLocation:
        """Return where Ray started this worker."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return WorkerLocation(
            node_ip=_node_ip(), node_id=self._node_id(), gpu=gpus[0] if gpus else ""
        )

    @records_activity
    def build_engine(self, engine: EngineConfig, *, sleeps: bool, keeps_parked: bool) -> None:
        """Start vLLM, and unlink its shared memory, so that a kill leaves nothing."""
        super().build_engine(engine, sleeps=sleeps, keeps_parked=keeps_parked)
        unlink_shared_memory()

    def _node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _use_network_of_ray() -> None:
    """Make gloo use the network interface of this node's address in the Ray cluster. By default it
    uses the address of the host name, which others may not reach (127.0.1.1).
    """
    ip = _node_ip()
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
