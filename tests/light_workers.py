"""Workers without model and engine, that fail as they are told: real processes, real Ray, real
collectives.
"""

from __future__ import annotations

import mmap
import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta

import ray

from april_rl.rollout.requests import Requests
from april_rl.runtime.parent_process import end_with_parent
from april_rl.runtime.supervision.heartbeat import Member, Pulse, told
from april_rl.ticks import Completions, Tick

LONG_S = 600.0


class LightWorker:
    """A rank of a gloo group; `update` meets the others in a collective, unless it has trouble."""

    def __init__(self) -> None:
        self.pulse, self._has_met = Pulse(), False
        end_with_parent()

    def member(self) -> Member:
        return self.pulse.member(ray.get_runtime_context().get_node_id())

    def join(self, folder: str, rank: int, world_size: int) -> None:
        """Meet the other ranks in `folder`."""
        import torch.distributed as dist

        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=LONG_S),
        )
        self._has_met = True

    def start_child(self) -> int:
        """A process of its own; its id."""
        code = f"import time; time.sleep({LONG_S})"
        # Of a session of its own, so that the kernel does not hang up on it with its parent.
        self._child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        return self._child.pid

    @told
    def update(self, trouble: str = "") -> int:
        """The number of ranks, by a collective where they have met; `trouble` comes before it."""
        self.pulse.beat()
        if trouble:
            TROUBLES[trouble](self)
        self.pulse.beat()
        return self._num_ranks()

    @told
    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:
        """A tick that comes back at once and has done nothing."""
        return Tick(
            finished=Completions(),
            num_running=len(submit.indices[:slots]),
            num_queued=0,
            engine_steps=0 * max_steps,
            slot_steps=0,
            context_token_steps=0,
            generated_tokens=0,
            prefilled_tokens=0,
            elapsed_s=0.0,
        )

    def _num_ranks(self) -> int:
        if not self._has_met:
            return 1
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total.item())

    @told
    def work(self, num_parts: int, part_s: float) -> int:
        """Beats after each of `num_parts` parts."""
        for _ in self.pulse.counted(range(num_parts)):
            time.sleep(part_s)
        return num_parts


def wait_in_python(_worker: LightWorker) -> None:
    threading.Event().wait(LONG_S)


def run_out_of_address_space(_worker: LightWorker) -> None:
    """As a machine without memory answers: the allocation fails."""
    used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE  # noqa: SIM115
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    bytearray(1 << 30)


def raise_an_error(_worker: LightWorker) -> None:
    raise IndexError("no such row")


TROUBLES = {
    "stuck": wait_in_python,
    "no memory": run_out_of_address_space,
    "error": raise_an_error,
}
