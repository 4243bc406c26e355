"""The memory that a process may have on its machine: of a container or a job it has the limit, of
which the machine as a whole knows nothing. How many processes the kernel has killed for want of it,
and how torch takes what is page-locked of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil


class HostMemory(NamedTuple):
    """Bytes."""

    total: int
    free: int  # with what the kernel gives up when it is asked for


class _Names(NamedTuple):
    """Of the files of a control group."""

    limit: str
    used: str
    kills: str
    reclaimable: str  # a line of the statistics


_STATISTICS = "memory.stat"
# Of Linux (its documentation: admin-guide/cgroup-v2 and cgroup-v1/memory).
_V2 = _Names("memory.max", "memory.current", "memory.events", "inactive_file")
_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"
)
_KILLS = "oom_kill"  # a line of the file that counts them
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

# Of torch: the first that is set counts.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_ROUNDED = "pinned_max_round_threshold_mb"  # what is larger is not rounded up


def host_memory(*, groups: Path = _GROUPS, own: Path = _OWN) -> HostMemory:
    """As it is now: the machine's, or what the tightest of this process's control groups leaves.

    `groups`: where they are mounted; `own`: which of them this process is in.
    """
    machine = psutil.virtual_memory()
    found = HostMemory(total=int(machine.total), free=int(machine.available))
    for folder, names in _folders(groups, own):
        limit = (folder / names.limit).read_text().strip()
        if limit == "max" or int(limit) >= machine.total:
            continue
        reclaimable = _line(folder / _STATISTICS, names.reclaimable)
        used = int((folder / names.used).read_text()) - reclaimable
        free = max(0, int(limit) - used)
        found = HostMemory(total=min(found.total, int(limit)), free=min(found.free, free))
    return found


def oom_counter(
    *, groups: Path = _GROUPS, own: Path = _OWN, machine: Path = Path("/proc/vmstat")
) -> Path:
    """The file that `oom_kills` reads for this process: its control group's, or where none counts
    them the `machine`'s, which other jobs and containers share.
    """
    counters = (folder / names.kills for folder, names in _folders(groups, own))
    return next((counter for counter in counters if counter.exists()), machine)


def oom_kills(counter: Path) -> int:
    """Processes the kernel has killed for want of memory, by `counter`: since the group was made,
    or the machine started. 0 where they are not counted.
    """
    with suppress(OSError):
        return _line(counter, _KILLS)
    return 0


def pinned_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to put into a process's environment before it imports torch, so that page-locked memory
    is as large as it is asked for; `environment` may have settings of torch's allocators already.

    Left alone torch takes the next power of two, for each tensor that the learner offloads: up to
    twice what the memory plan says of the host.
    """
    found = (environment.get(name) for name in _ALLOCATOR_VARIABLES)
    given = next(filter(None, found), "")
    if _ROUNDED in given:
        return {}
    settings = f"{given},{_ROUNDED}:1" if given else f"{_ROUNDED}:1"
    return {_ALLOCATOR_VARIABLES[0]: settings}


def _line(file: Path, name: str) -> int:
    """The number behind `name` in a file of such lines; 0 when it is not there."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), 0)


def _folders(groups: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    """Of every group that counts this process's memory: its own and those around it.

    In a container the path may be the machine's: what is left of it then is the mount itself.
    """
    if not own.exists():
        return
    for line in own.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = groups, _V2
        elif "memory" in controllers.split(","):
            mount, names = groups / "memory", _V1
        else:
            continue
        inner = mount / path.lstrip("/")
        for folder in (inner, *inner.parents):
            files = (names.limit, names.used, _STATISTICS)
            if folder.is_relative_to(mount) and all((folder / name).exists() for name in files):
                yield folder, names
