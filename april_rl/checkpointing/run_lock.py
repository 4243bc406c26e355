"""A run owns its directory: a lock file that says who writes there, since when and on which host.

The owner holds the file's kernel lock (flock), which ends with its process, however that ends. File
systems that do not share such locks between machines are covered by the file's time, which the
owner renews: on another host it is believed for STALE_S after the last renewal.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from april_rl.errors import RunError

FILE = "run.lock"
RENEW_S, STALE_S = 20.0, 120.0
_PATIENCE_S = 1.0  # somebody may only be looking whether the run has an owner


class RunOwnedError(RunError):
    """Another process writes into the run directory."""


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Own `run_dir` until the context ends.

    Raise RunOwnedError, naming the owner, when a living process owns it; nothing is changed then.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, is_over = run_dir / FILE, threading.Event()
    with _locked(path) as file:
        _sign(file)
        renewal = threading.Thread(target=_renew, args=(path, is_over), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            is_over.set()
            renewal.join()
            path.unlink(missing_ok=True)  # while it is locked: see _locked


def owner_of(run_dir: Path) -> str | None:
    """Return the living owner of a run directory in words, or None."""
    path = run_dir / FILE
    if not path.is_file():
        return None
    try:
        with _locked(path):
            return None
    except RunOwnedError:
        return _described(path)


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Hold the lock of `path`; raise RunOwnedError when a living process has it.

    An owner removes the file while it still holds its lock, so whoever has waited for that file
    takes the next one.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (file := _lock(path)) is None:
        if time.monotonic() >= deadline:
            raise _refusal(path)
        time.sleep(_PATIENCE_S / 20)
    with file:
        if _is_of_another_host(file):
            raise _refusal(path)
        yield file


def _lock(path: Path) -> IO[str] | None:
    """Return the file with its kernel lock; None when another process has it, or has removed it."""
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    file = os.fdopen(number, "r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if path.exists() and os.path.samestat(os.fstat(number), path.stat()):
        return file
    file.close()
    return None


def _is_of_another_host(file: IO[str]) -> bool:
    """Return whether the owner is on a host whose kernel lock may not be seen here, and alive."""
    host = _read(file.read()).get("host", socket.gethostname())
    age_s = time.time() - os.fstat(file.fileno()).st_mtime
    return host != socket.gethostname() and age_s < STALE_S


def _sign(file: IO[str]) -> None:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
    file.seek(0)
    file.truncate()
    file.write(json.dumps(owner) + "\n")
    file.flush()


def _renew(path: Path, is_over: threading.Event) -> None:
    while not is_over.wait(RENEW_S):
        with suppress(OSError):
            os.utime(path)


def _refusal(path: Path) -> RunOwnedError:
    return RunOwnedError(
        f"{path.parent} belongs to a run that is going on ({_described(path)}). Wait until it has "
        "ended, or give this run a directory of its own: hydra.run.dir=FOLDER, or another name=NAME"
    )


def _described(path: Path) -> str:
    try:
        owner = _read(path.read_text(encoding="utf-8"))
    except OSError:
        owner = {}
    return "process {pid} on {host}, since {since}".format_map(
        {"pid": "?", "host": "?", "since": "?"} | owner
    )


def _read(text: str) -> dict[str, object]:
    """Return what the owner has written; nothing when it died while it wrote."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
