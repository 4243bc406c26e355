"""A run owns its directory: a lock file that says who writes there, since when and on which host.

The owner holds the file's kernel lock (flock), which ends with its process, even if that is killed.
Every process that reaches the file through the same mount of the same kernel sees that lock, in
other containers too. An owner elsewhere, or on a file system without such locks, shows that it
is alive by renewing the file's time. A process that wants the directory watches that time for
STALE_S. It compares readings only with each other, because the clocks of two machines may differ
by any amount.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from io import FileIO
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from april_rl.errors import RunError

FILE = "run.lock"
RENEW_S, STALE_S = 20.0, 120.0  # an owner that has missed six renewals counts as dead
_PATIENCE_S = 1.0  # another process may only be checking whether the run has an owner
_POLL_S = 1.0  # how often the file's time is read
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_open_files: WeakSet[FileIO] = WeakSet()


class RunOwnedError(RunError):
    """Another process writes into the run directory."""


class _Opened(NamedTuple):
    file: FileIO
    is_new: bool  # this process created the file
    lock: str | None  # which processes see its lock; None: the file system has no locks


@contextmanager
def own(run_dir: Path) -> Iterator[None]:
    """Own `run_dir` until the context ends.

    Wait until it is known whether an owner on another machine is alive. Raise RunOwnedError, naming
    the owner, when a living process owns the directory; nothing is changed then.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"run directory {run_dir} cannot be made here ({error.strerror}): give a folder that "
            "you can write to with hydra.run.dir=FOLDER (in Python run_dir=FOLDER)"
        ) from error
    path, is_over = run_dir / FILE, threading.Event()
    with _free(path, creates=True) as opened:
        mine = _sign(opened)
        renewal = threading.Thread(target=_renew, args=(path, is_over), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            is_over.set()
            renewal.join()
            if _owner_in(path) == mine:  # otherwise another process took over while this one hung
                path.unlink(missing_ok=True)  # while it is locked: see _acquire


def owner_of(run_dir: Path) -> str | None:
    """Describe the living owner of a run directory, or return None; remove a dead owner's file."""
    path = run_dir / FILE
    if not path.is_file():
        return None
    try:
        with _free(path, creates=False):
            path.unlink(missing_ok=True)
            return None
    except FileNotFoundError:  # the owner has just ended
        return None
    except RunError:
        return _describe(path)


@contextmanager
def _free(path: Path, *, creates: bool) -> Iterator[_Opened]:
    first: tuple[int, float] | None = None  # the file's time, and when it was read
    while True:
        with (opened := _acquire(path, creates=creates)).file:
            time_ns, now = os.fstat(opened.file.fileno()).st_mtime_ns, time.monotonic()
            first = first or (time_ns, now)
            if _has_ended(opened) or (time_ns == first[0] and now - first[1] >= STALE_S):
                yield opened
                return
        if time_ns != first[0]:
            raise _refusal(path)
        _say_once(
            f"{path.parent} belongs to a run on another machine, or was left behind by one "
            f"({_describe(path)}): waiting up to {STALE_S:.0f} s for a sign of life"
        )
        time.sleep(_POLL_S)


def _acquire(path: Path, *, creates: bool) -> _Opened:
    """Open and lock the file; raise RunOwnedError when another process has the lock.

    An owner removes the file while it still holds the lock, so a process that has waited for
    that file opens the next one.
    """
    deadline = time.monotonic() + _PATIENCE_S
    was_beaten = (BlockingIOError, FileExistsError, *([FileNotFoundError] if creates else []))
    while True:
        with suppress(*was_beaten):
            opened = _open(path, creates=creates)
            if _has_name(opened.file, path):
                return opened
            opened.file.close()
        if time.monotonic() >= deadline:
            raise _refusal(path)
        time.sleep(_PATIENCE_S / 20)


def _has_name(file: FileIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _open(path: Path, *, creates: bool) -> _Opened:
    is_new = creates and not path.exists()
    try:
        file = FileIO(path, "x+" if is_new else "r+")
        _open_files.add(file)
        return _Opened(file, is_new, _lock(file, path.parent))
    except (BlockingIOError, FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be opened ({error.strerror}): remove it") from error


def _lock(file: FileIO, folder: Path) -> str | None:
    """Take the kernel lock; return a name that is the same for all processes that see the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        _say_once(
            f"{folder} is on a file system without file locks ({error.strerror}): a run there that "
            f"was killed counts as alive for {STALE_S:.0f} s after its last sign of life"
        )
        return None
    kernel = _BOOT_ID.read_text("ascii").strip() if _BOOT_ID.exists() else socket.gethostname()
    return f"{kernel} {os.fstat(file.fileno()).st_dev}"


def _has_ended(opened: _Opened) -> bool:
    """Return whether the file has no owner, or a dead one: a living one would hold the lock."""
    if opened.is_new:
        return True
    owner = _read(opened.file.readall())
    return opened.lock is not None and (not owner or owner.get("lock") == opened.lock)


def _sign(opened: _Opened) -> dict[str, object]:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "lock": opened.lock}
    opened.file.seek(0)
    opened.file.truncate()
    opened.file.write(json.dumps(owner).encode() + b"\n")
    return owner


def _renew(path: Path, is_over: threading.Event) -> None:
    while not is_over.wait(RENEW_S):
        with suppress(OSError):
            os.utime(path)


def _close_in_child() -> None:
    """Close the lock in a forked process, which may outlive the owner."""
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def _refusal(path: Path) -> RunOwnedError:
    return RunOwnedError(
        f"{path.parent} belongs to a run that is still active ({_describe(path)}). Wait until "
        "it has ended, or give this run a directory of its own: hydra.run.dir=FOLDER, or another "
        "name=NAME"
    )


def _describe(path: Path) -> str:
    owner = _owner_in(path)
    words = {key: _plain(owner.get(key)) for key in ("pid", "host", "since")}
    return "process {pid} on {host}, since {since}".format_map(words)


def _plain(value: object) -> str:
    """Return a value without characters that control a terminal."""
    return "?" if value is None else re.sub(r"[^\w.:+-]", "?", str(value))[:64]


def _owner_in(path: Path) -> dict[str, object]:
    try:
        return _read(path.read_bytes())
    except OSError:
        return {}


def _read(text: bytes) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
