"""A lock between processes that says what it waits for."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

WAIT_SILENTLY_S = 1.0  # for another process's build, before saying so


@contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock file, after whoever holds it now to build `what`; a lock ends with its process.

    Waiting is told on stderr.
    """
    with path.open("w") as file:
        if not _lock_soon(file):
            message = f"another process is building {what}; waiting for it"
            print(message, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_soon(file: TextIO) -> bool:
    """Whether the lock was free within WAIT_SILENTLY_S; it is held then."""
    deadline = time.monotonic() + WAIT_SILENTLY_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True
