"""Workers without model and engine that fail as a test chooses, with real Ray and collectives."""

import ctypes
import mmap
import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta

import ray
from light_samples import make_tick

from april_rl.run.supervision.heartbeat import Heartbeat, WorkerProcess, records_activity
from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Tick
from april_rl.training.runtime.process_setup import end_with_parent

LONG_S = 600.0


class LightWorker:
    """A rank of a gloo group; `update` is a collective, before which one rank may fail."""

    def __init__(self) -> None:
        self.heartbeat, self._has_joined = Heartbeat(), False
        end_with_parent()

    def process(self) -> WorkerProcess:
        return self.heartbeat.process(ray.get_runtime_context().get_node_id())

    def join(self, folder: str, rank: int, world_size: int) -> None:
        """Form a process group with the other ranks, through `folder`."""
        import torch.distributed as dist

        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=LONG_S)
        )
        self._has_joined = True

    def start_child(self) -> int:
        code = f"import time; time.sleep({LONG_S})"
        # In its own session, so that it does not get a SIGHUP when its parent ends.
        self._child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        return self._child.pid

    @records_activity
    def update(self, fault: str = "") -> int:
        """Return the number of ranks from a collective, once joined; `fault` happens before it."""
        self.heartbeat.beat()
        if fault:
            FAULTS[fault](self)
        self.heartbeat.beat()
        return self._num_ranks()

    @records_activity
    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:  # noqa: ARG002
        """Return an empty tick at once."""
        return make_tick(engine_steps=0)

    def _num_ranks(self) -> int:
        if not self._has_joined:
            return 1
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total.item())

    @records_activity
    def work(self, num_parts: int, part_s: float) -> int:
        """Beat at each of `num_parts` parts."""
        for _ in range(num_parts):
            self.heartbeat.beat()
            time.sleep(part_s)
        return num_parts


def wait_in_python(_worker: LightWorker) -> None:
    threading.Event().wait(LONG_S)


def run_out_of_address_space(_worker: LightWorker) -> None:
    """Make an allocation fail, as on a machine without memory."""
    used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE  # noqa: SIM115
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    bytearray(1 << 30)


def crash_in_native_code(_worker: LightWorker) -> None:
    ctypes.string_at(0)


def raise_an_error(_worker: LightWorker) -> None:
    raise IndexError("no such row")


FAULTS = {
    "hang": wait_in_python,
    "no memory": run_out_of_address_space,
    "crash": crash_in_native_code,
    "error": raise_an_error,
}
