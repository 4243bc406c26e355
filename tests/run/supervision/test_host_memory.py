"""Memory under a limit: containers and batch jobs, in both versions of Linux's control groups."""

from pathlib import Path

import psutil
import pytest

from april_rl.run.supervision.host_memory import (
    allocator_environment,
    host_memory,
    oom_counter,
    oom_kills,
)

GIB = 1 << 30
LIMITS = {"v2": "memory.max", "v1": "memory.limit_in_bytes"}
USED = {"v2": "memory.current", "v1": "memory.usage_in_bytes"}
KILLS = {"v2": "memory.events", "v1": "memory.oom_control"}
CACHE = {"v2": "inactive_file", "v1": "total_inactive_file"}


def write_group(folder: Path, version: str, *, limit: object, used: float, cache: float) -> None:
    """Write a control group with `used` MiB, of which `cache` are cache."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIMITS[version]).write_text(f"{limit}\n")
    (folder / USED[version]).write_text(f"{int(used * 2**20)}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{CACHE[version]} {int(cache * 2**20)}\n")


def where(folder: Path, version: str, *, path: str) -> dict[str, Path]:
    """Return the files of a process whose group is `path`."""
    own = folder / "own"
    lines = {"v2": f"0::{path}\n", "v1": f"9:cpu:/elsewhere\n4:memory:{path}\n"}
    own.write_text(lines[version])
    return {"groups": folder / "groups", "own": own}


def memory_of(folder: Path, version: str, *, path: str):
    return host_memory(**where(folder, version, path=path))


def mount(folder: Path, version: str) -> Path:
    return folder / "groups" / {"v2": "", "v1": "memory"}[version]


@pytest.mark.parametrize("version", LIMITS)
def test_the_tightest_group_around_a_process_decides(tmp_path, version):
    """A job of 64 MiB with a task without a limit. Fails when the machine's memory is reported,
    when only the innermost group is read, or when the kernel's file cache counts as used.
    """
    top = mount(tmp_path, version)
    none = {"v2": "max", "v1": 2**63 - 4096}[version]
    write_group(top / "job", version, limit=64 << 20, used=50, cache=20)
    write_group(top / "job" / "task", version, limit=none, used=50, cache=20)
    found = memory_of(tmp_path, version, path="/job/task")
    assert (found.total, found.free) == (64 << 20, 34 << 20)


@pytest.mark.parametrize("version", LIMITS)
def test_in_a_container_the_group_is_the_mount_itself(tmp_path, version):
    """The path comes from the machine and does not exist here. Fails when the limit is looked up
    there.
    """
    write_group(mount(tmp_path, version), version, limit=64 << 20, used=80, cache=0)
    found = memory_of(tmp_path, version, path="/kubepods/pod/container")
    assert (found.total, found.free) == (64 << 20, 0)


def test_without_a_limit_the_memory_of_the_machine_counts(tmp_path):
    (tmp_path / "groups").mkdir()
    found = memory_of(tmp_path, "v2", path="/")
    assert found.total == psutil.virtual_memory().total
    assert found.free == pytest.approx(psutil.virtual_memory().available, abs=GIB)
    assert host_memory().free <= psutil.virtual_memory().total


@pytest.mark.parametrize("version", LIMITS)
def test_kills_are_counted_in_the_group_of_a_process_if_it_counts_them(tmp_path, version):
    """Without a group that counts, the count of the machine is used, and without that none. Fails
    when the machine's kills count although the group has a count, since other jobs run there, or
    when failed allocations count.
    """
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 7\noom_kill 40\n")
    task = mount(tmp_path, version) / "job"
    write_group(task, version, limit=64 << 20, used=50, cache=20)
    process = where(tmp_path, version, path="/job")
    assert oom_kills(oom_counter(**process, machine=vmstat)) == 40
    (task / KILLS[version]).write_text("oom 9\noom_kill_disable 1\noom_kill 2\n")
    assert oom_kills(oom_counter(**process, machine=vmstat)) == 2
    assert oom_kills(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True,pinned_max_round_threshold_mb:1"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            "max_split_size_mb:64,pinned_max_round_threshold_mb:1",
        ),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:8"}, None),
    ],
)
def test_the_users_allocator_settings_are_kept(given, expected):
    """Fails when one variable hides the settings of another, since torch reads the first that is
    set, or when segments become expandable although the user has chosen how memory is allocated.
    """
    assert allocator_environment(given).get("PYTORCH_ALLOC_CONF") == expected
