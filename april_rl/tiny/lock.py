"""A lock between processes that reports when it has to wait."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

WAIT_SILENTLY_S = 1.0  # wait for another process this long before reporting it


@contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock file `path` while building `what`; report on stderr if another process holds
    it.

    The kernel releases the lock when the process ends.
    """
    with path.open("w") as file:
        if not _lock_soon(file):
            message = f"another process is building {what}; waiting for it"
            print(message, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_soon(file: TextIO) -> bool:
    """Try for WAIT_SILENTLY_S to take the lock; return whether it is held."""
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
