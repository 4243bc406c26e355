"""A run owns its directory: a second one is refused, and a dead owner is recognised."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from april_rl.errors import RunError
from april_rl.run.checkpointing import run_lock
from april_rl.run.checkpointing.resume import AUTO, unfinished_run
from april_rl.run.checkpointing.run_lock import FILE, RENEW_S, STALE_S, RunOwnedError, own, owner_of
from april_rl.start.command_line import run_directory

OWNER = """
import sys, time
from pathlib import Path
from april_rl.run.checkpointing.run_lock import own
with own(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(60)
"""
FORKED = """
import os, sys, time
from pathlib import Path
from april_rl.run.checkpointing.run_lock import own
with own(Path(sys.argv[1])):
    if child := os.fork():
        print(child, flush=True)
    time.sleep(60)
"""
ELSEWHERE = {"host": "elsewhere", "pid": 1, "since": "noon", "lock": "another-boot 7"}
HOUR_NS = 3600 * 10**9


class Clock:
    """Time that passes during sleep, and what other processes do in the meantime."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run_lock, "time", clock)
    run_lock._say_once.cache_clear()
    return clock


def no_locks(monkeypatch, number=errno.ENOSYS):
    """Make every file system behave like one without flock."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)


def renews(path: Path, clock: Clock, by_ns: int = 0) -> Callable[[], None]:
    """Make an owner renew its file with a clock that is `by_ns` ahead."""

    def renew() -> None:
        now = int(clock.now // RENEW_S * RENEW_S * 10**9) + by_ns + 10**18
        os.utime(path, ns=(now, now))

    return renew


@pytest.fixture
def owner(tmp_path):
    args = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_a_second_owner_is_refused_with_the_name_of_the_first(owner, tmp_path):
    """Fails when two runs write into one directory, or the message does not name the owner."""
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = rf"process {owner.pid} on .*hydra\.run\.dir"
    with pytest.raises(RunOwnedError, match=said), own(tmp_path):
        pytest.fail("two owners")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert f"process {owner.pid} on " in owner_of(tmp_path)


def test_an_owner_that_was_killed_leaves_the_directory_free(owner, tmp_path):
    """Its file remains. Fails when the file alone makes an owner."""
    owner.kill()
    owner.wait()
    assert (tmp_path / FILE).is_file()
    assert owner_of(tmp_path) is None
    with own(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_outlives_the_owner_does_not_keep_the_directory(tmp_path):
    """A fork inherits the owner's open files. Fails when it keeps the owner's lock."""
    args = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            assert owner_of(tmp_path) is not None
            process.kill()
            process.wait()
            assert owner_of(tmp_path) is None
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("ahead_ns", [0, HOUR_NS, -HOUR_NS])
def test_an_owner_on_another_machine_is_refused_as_long_as_it_renews_its_file(
    clock, tmp_path, ahead_ns
):
    """The other machine's clock does not matter. Fails when a time from its clock is compared with
    ours.
    """
    path = tmp_path / FILE
    path.write_text(json.dumps(ELSEWHERE))
    clock.meanwhile = renews(path, clock, ahead_ns)
    clock.meanwhile()
    with pytest.raises(RunOwnedError, match="process 1 on elsewhere, since noon"), own(tmp_path):
        pytest.fail("two owners")
    assert clock.now <= 2 * RENEW_S
    assert json.loads(path.read_text()) == ELSEWHERE


@pytest.mark.parametrize("ahead_ns", [0, HOUR_NS, -HOUR_NS])
def test_an_owner_that_died_on_another_machine_is_waited_for_once(
    clock, tmp_path, ahead_ns, capsys
):
    """The wait is announced in one line. Fails when the next run ends, or when resume=auto waits
    twice: while it looks for the run, and when the run starts.
    """
    path = tmp_path / "runs" / "one" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(ELSEWHERE))
    last_sign = time.time_ns() + ahead_ns
    os.utime(path, ns=(last_sign, last_sign))
    assert unfinished_run(tmp_path / "runs") is None
    with own(path.parent):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert STALE_S <= clock.now <= STALE_S + 2 * RENEW_S
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "on elsewhere, since noon" in said


def test_a_container_that_died_on_this_machine_leaves_the_directory_free(clock, tmp_path):
    """Its host had another name. Fails when the name decides instead of who sees the lock: one
    kernel, through one mount.
    """
    path = tmp_path / FILE
    with own(tmp_path):
        mine = json.loads(path.read_text())
    path.write_text(json.dumps(mine | {"host": "elsewhere"}))
    with own(tmp_path):
        assert clock.now == 0.0


@pytest.mark.parametrize("kernel", ["another", socket.gethostname()])
def test_a_lock_of_another_kernel_or_mount_is_not_visible_here(clock, tmp_path, kernel):
    """Its host name does not matter. Fails when an owner counts as dead that may be alive."""
    path = tmp_path / FILE
    with own(tmp_path):
        mine = json.loads(path.read_text())
    here, mount = mine["lock"].split()
    for lock in (f"{kernel} {mount}", f"{here} {mount}1"):
        clock.now = 0.0
        path.write_text(json.dumps(mine | {"lock": lock}))
        with own(tmp_path):
            assert clock.now >= STALE_S


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported_once_and_the_file_time_decides(
    clock, monkeypatch, tmp_path, capsys, number
):
    """Fails when no run can start there, when two can, or when a dead one keeps the directory
    forever.
    """
    no_locks(monkeypatch, number)
    path = tmp_path / FILE
    with own(tmp_path):
        clock.meanwhile = renews(path, clock)
        clock.meanwhile()
        with pytest.raises(RunOwnedError, match=f"process {os.getpid()} on "), own(tmp_path):
            pytest.fail("two owners")
        left = path.read_bytes()
    assert not path.exists()
    path.write_bytes(left)
    clock.meanwhile, clock.now = lambda: None, 0.0
    with own(tmp_path):
        assert clock.now >= STALE_S
    assert capsys.readouterr().err.count("without file locks") == 1


def test_resume_auto_finds_its_run_on_a_file_system_without_locks(clock, monkeypatch, tmp_path):
    no_locks(monkeypatch)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "outputs" / "name" / "one" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(ELSEWHERE))
    assert run_directory(AUTO, "name", "fresh") == "fresh"
    path.write_text(json.dumps(ELSEWHERE))
    clock.meanwhile = renews(path, clock)
    assert run_directory(AUTO, "name", "fresh") == str(Path("outputs", "name", "one"))


def test_an_owner_that_hung_and_lost_its_directory_keeps_the_file_of_the_next(tmp_path):
    """Fails when it removes that file, so that a third run starts."""
    path = tmp_path / FILE
    with own(tmp_path):
        path.write_text(json.dumps(ELSEWHERE))
    assert json.loads(path.read_text()) == ELSEWHERE


def test_an_owner_that_ends_during_the_check_does_not_count(monkeypatch, tmp_path):
    """Fails with a traceback when the file disappears between two reads."""
    path = tmp_path / FILE
    fstat = os.fstat

    def ends(number):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(os, "fstat", fstat)
        return fstat(number)

    path.write_text("")
    monkeypatch.setattr(os, "fstat", ends)
    assert owner_of(tmp_path) is None
    path.write_text("")
    monkeypatch.setattr(os, "fstat", ends)
    with own(tmp_path):
        assert path.exists()


def test_a_folder_in_place_of_the_file_gives_one_error(tmp_path):
    (tmp_path / FILE).mkdir()
    assert owner_of(tmp_path) is None
    with pytest.raises(RunError, match=r"run\.lock cannot be opened"), own(tmp_path):
        pytest.fail("owned a folder")


@pytest.mark.parametrize("text", ['{"host": null}', "null", "[1]", '{"lock": null, "pid": {}}'])
def test_a_file_that_names_no_owner_is_free_in_the_end(clock, tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with own(tmp_path):
        assert clock.now <= STALE_S + 2 * RENEW_S


def test_the_text_of_a_lock_file_cannot_control_the_terminal(tmp_path):
    owner = ELSEWHERE | {"host": "\x1b[2J[red]x[/red]\n", "since": None}
    (tmp_path / FILE).write_text(json.dumps(owner))
    assert run_lock._describe(tmp_path / FILE) == "process 1 on ??2J?red?x??red??, since ?"


def test_a_run_in_progress_is_found_before_its_first_checkpoint(owner, tmp_path):
    """Its directory is then refused. Fails when `resume=auto` starts another run in parallel."""
    assert owner.poll() is None
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "one").symlink_to(tmp_path)
    assert unfinished_run(runs) == runs / "one"


def test_reading_the_owner_of_a_directory_changes_nothing(tmp_path):
    assert owner_of(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert owner_of(Path(tmp_path, "missing")) is None
