"""Ctrl-C, and a scheduler's SIGTERM.

Each raises KeyboardInterrupt once. A library may swallow that where it waits, so it is also noted,
and `check` raises it again; a run that does not end all the same is ended from outside its main
thread.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

_PATIENCE_S = 7.0
EXIT_STATUS = 128 + signal.SIGINT


class Interrupts:
    """Owner of the process's SIGINT and SIGTERM from its construction on; main thread only."""

    def __init__(self) -> None:
        """No signal has come yet."""
        self._is_requested = self._is_held = False
        self._timer: threading.Timer | None = None
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def check(self) -> None:
        """Raise KeyboardInterrupt when a signal has come, however often it is asked."""
        if self._is_requested:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal only raises where `check` is called: what is in between is never torn apart."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def arm(self) -> None:
        """After a signal: end everything unless the process does so itself in some seconds."""
        if self._is_requested:
            self._timer = threading.Timer(_PATIENCE_S, _end_everything)
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        """What comes now may take its time."""
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal ends the run; more of them do not disturb its ending."""
        if self._is_requested:
            return
        self._is_requested = True
        self.arm()
        if not self._is_held:
            raise KeyboardInterrupt


def _end_everything() -> None:
    """Say where every thread stands, and end this process with all its descendants."""
    print(f"the run did not end within {_PATIENCE_S:g} s of its signal:", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(EXIT_STATUS)
