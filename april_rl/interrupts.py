"""Signals that end a run: Ctrl-C, a scheduler's SIGTERM, and SIGUSR1 (Slurm's `--signal`).

Outside `held` the first one raises KeyboardInterrupt where the program is. Inside, it is noted, and
`check` raises: the run stops where nothing is torn apart, and has time to write a checkpoint. A
process that has not ended by then is ended from outside its main thread; a second signal does so at
once.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_STATUS = 128 + signal.SIGINT
_PATIENCE_S = 7.0  # where nothing has to be written
_SAME_SIGNAL_S = 1.0  # `timeout` sends its signal to the process and to its group


class Interrupts:
    """Owner of the process's SIGNALS from its construction on; main thread only."""

    def __init__(self) -> None:
        self._requested: signal.Signals | None = None
        self._requested_s = 0.0
        self._hours, self._ends_s = 0.0, math.inf
        self._patience_s = _PATIENCE_S
        self._is_held = False
        self._timer: threading.Timer | None = None
        for which in SIGNALS:
            signal.signal(which, self._note)

    @property
    def reason(self) -> str:
        """Return what asked the run to stop."""
        return self._requested.name if self._requested else f"trainer.max_hours={self._hours:g}"

    @property
    def is_requested(self) -> bool:
        """Return whether a signal has come."""
        return self._requested is not None

    @property
    def is_person(self) -> bool:
        """Return whether somebody pressed Ctrl-C."""
        return self._requested is signal.SIGINT

    def check(self) -> None:
        """Raise KeyboardInterrupt when a signal has come, or the time is over, however often it is
        asked.
        """
        if self._requested is not None or time.monotonic() >= self._ends_s:
            raise KeyboardInterrupt

    def end_after(self, *, hours: float) -> None:
        """Have `check` raise from so many hours from now on; 0: no limit."""
        self._hours = hours
        self._ends_s = time.monotonic() + 3600 * hours if hours else math.inf

    @contextmanager
    def held(self, *, deadline_s: float) -> Iterator[None]:
        """Let a signal raise only where `check` is called, and give the process `deadline_s` to end
        after it.
        """
        self._is_held, self._patience_s = True, deadline_s
        try:
            yield
        finally:
            self._is_held, self._patience_s = False, _PATIENCE_S

    def arm(self) -> None:
        """After a signal: end everything unless the process does so itself in time."""
        if self._requested is not None:
            self._timer = threading.Timer(self._patience_s, _end_everything, [self._patience_s])
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        """Let what comes now take its time."""
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._requested is not None:
            if time.monotonic() - self._requested_s >= _SAME_SIGNAL_S:
                _end_processes()
            return
        self._requested, self._requested_s = signal.Signals(signum), time.monotonic()
        self.arm()
        if not self._is_held:
            raise KeyboardInterrupt


@contextmanager
def blocked_for_children() -> Iterator[None]:
    """Have processes that are started meanwhile never receive SIGNALS: they inherit the mask.

    A scheduler sends its signal to every process of a job. Ray's would end, and nobody could write
    a checkpoint. SIGKILL, with which they are ended, cannot be blocked. Handlers of this process
    are its own again afterwards: Ray puts one in their place that ends the process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers = {which: signal.getsignal(which) for which in SIGNALS}
    try:
        yield
    finally:
        for which, handler in handlers.items():
            signal.signal(which, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_everything(patience_s: float) -> None:
    """Say where every thread stands, and end this process with all its descendants."""
    print(f"the run did not end within {patience_s:g} s of its signal:", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    _end_processes()


def _end_processes() -> None:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(EXIT_STATUS)
