"""The memory that a process may use, kills for lack of memory, and how torch allocates memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil


class HostMemory(NamedTuple):
    """Bytes that a process may use on its machine."""

    total: int
    free: int  # including memory that the kernel can reclaim


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Bytes that a worker found before it loaded anything."""

    node_id: str
    device_bytes: int  # total memory of its GPU; 0 on CPU
    free_bytes: int  # free memory of its GPU; 0 on CPU
    host_free_bytes: int  # free memory of its node, which the node's other workers share


class _FileNames(NamedTuple):
    """Names of a control group's files."""

    limit: str
    used: str
    kills: str
    reclaimable: str  # name of a line in the statistics file


_STATISTICS = "memory.stat"
# The names are from the Linux documentation, admin-guide/cgroup-v2 and cgroup-v1/memory.
_V2 = _FileNames("memory.max", "memory.current", "memory.events", "inactive_file")
_V1 = _FileNames(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"
)
_KILLS = "oom_kill"  # name of a line in the file that counts kills
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

# torch reads the first of these variables that is set.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_ROUNDED = "pinned_max_round_threshold_mb"  # larger allocations are not rounded up
_EXPANDABLE = "expandable_segments:True"


def host_memory(*, groups: Path = _GROUPS, own: Path = _OWN) -> HostMemory:
    """Return the machine's memory, or what the tightest control group of this process leaves of it.

    `groups` is where control groups are mounted; `own` lists the groups of this process.
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
    """Return the file that counts kills for the group of this process, or for the whole machine."""
    counters = (folder / names.kills for folder, names in _folders(groups, own))
    return next((counter for counter in counters if counter.exists()), machine)


def oom_kills(counter: Path) -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 if not counted."""
    with suppress(OSError):
        return _line(counter, _KILLS)
    return 0


def allocator_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for torch's allocators in a worker on a GPU; set them before it
    imports torch. `environment` may hold allocator settings already.

    Page-locked memory is not rounded up: by default torch takes the next power of two for each
    tensor that the learner offloads, up to twice the host memory in the memory plan. Segments of
    GPU memory can grow, unless the user has allocator settings: pieces that learner and engine
    leave to each other would not fit the next tensor (NVIDIA-NeMo/RL#919). vLLM turns this off
    around the memory that sleeps.
    """
    found = (environment.get(name) for name in _ALLOCATOR_VARIABLES)
    given = next(filter(None, found), "")
    if _ROUNDED in given:
        return {}
    return {_ALLOCATOR_VARIABLES[0]: f"{given or _EXPANDABLE},{_ROUNDED}:1"}


def _line(file: Path, name: str) -> int:
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), 0)


def _folders(groups: Path, own: Path) -> Iterator[tuple[Path, _FileNames]]:
    """Yield every control group that limits this process's memory: its own and those around it.

    In a container the listed path may be the machine's; then only the mount itself exists.
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
