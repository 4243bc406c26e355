"""Set-up of a worker's process: threads, end with the parent, shared memory; advice about Ray."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAPS = Path("/proc/self/maps")  # a file of Linux with address, mode, offset, device, inode, path
_SHARED_MEMORY = Path("/dev/shm")
# Memory of vLLM's reduction on CPU, of its message queues, and of multiprocessing's locks.
_SHARED_NAMES = re.compile(r".*-cpushm_\d+|psm_\w+|sem\.mp-\w+")


def thread_environment(threads: int) -> dict[str, str]:
    """Return environment variables for a process that uses `threads` threads on CPU; set them
    before it imports torch. Without them Ray allows one.

    Idle threads spin for some microseconds between two operations and then sleep. If they slept at
    once, small matrices would wait for threads to wake up. If they spun forever, engine, learner,
    controller and rewards would take cores from each other: on two cores, steps take up to ten
    times longer.
    """
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "3000"}


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even if this process is stopped.

    Ray's workers notice the end of their node by themselves unless they are stopped: then they
    would hold their memory and their GPU forever.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == 1:  # the parent had ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def unlink_shared_memory() -> int:
    """Remove the names of the shared memory that vLLM has open in this process; return how many.

    Call it when every rank of an engine has started: all have the memory open then, and no process
    needs its name again. Memory without a name is freed when the last process that has it open
    ends, even if that process is killed.
    """
    if not _MAPS.exists():
        return 0
    lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    # Compare inodes: a lock is created under another name than its final one.
    mapped = {int(line[4]) for line in lines if line[-1].startswith(f"{_SHARED_MEMORY}/")}
    with os.scandir(_SHARED_MEMORY) as entries:
        names = [e.path for e in entries if _SHARED_NAMES.fullmatch(e.name) and e.inode() in mapped]
    for name in names:
        Path(name).unlink(missing_ok=True)
    return len(names)


def start_advice(reason: str) -> str:
    """Return what to do when Ray did not start for this reason."""
    if "AF_UNIX path" in reason:
        name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
        return (
            f"{name}={os.environ.get(name, '')} is too long for Ray's sockets: set RAY_TMPDIR to a "
            "folder of at most 38 characters, such as /tmp"
        )
    if f"{Path.home()}/.ray" in reason:
        return (
            f"Ray writes into .ray in your home folder: set HOME={Path.home()} to a folder that "
            "you can write to"
        )
    return (
        "If the machine is busy, start again when other programs have ended, or let Ray wait "
        "longer with RAY_gcs_server_port_wait_time_s=300 in the environment; if its disk is full, "
        "make room in /tmp. Ray's logs are in /tmp/ray/session_latest/logs"
    )
