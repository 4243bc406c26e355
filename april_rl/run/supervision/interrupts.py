"""Signals that end a run: Ctrl-C, a scheduler's SIGTERM, SIGUSR1 (Slurm's `--signal`), and SIGHUP
of a closed terminal or a lost connection.

Outside `hold`, the first signal raises KeyboardInterrupt at once. Inside, it is noted and `check`
raises, so that the run stops at a consistent point and has time to write a checkpoint. A timer
thread kills a process that has not ended by its deadline; a second signal kills it at once. A
notebook or a script that called `train` lives on: then only the run's own processes are killed.

Python drops what is raised within a `__del__`, so the signal is sent again when that happens.
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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
EXIT_STATUS = 128 + signal.SIGINT
_PATIENCE_S = 7.0  # time to end when no checkpoint has to be written
_AGAIN_S = 0.1  # by then the `__del__` that swallowed the exception has ended
_SAME_SIGNAL_S = 1.0  # `timeout` signals the process and its group, which counts once


class Interrupts:
    """Handler of the process's SIGNALS, from its construction on; main thread only."""

    def __init__(self, *, owns_process: bool = True) -> None:
        """`owns_process` says that this process is a command, which ends with the run."""
        # Processes of a caller that lives on, which are not the run's.
        self._others = None if owns_process else psutil.Process().children(recursive=True)
        self._requested: signal.Signals | None = None
        self._requested_s = 0.0
        self._hours, self._ends_s = 0.0, math.inf
        self._patience_s = _PATIENCE_S
        self._is_held = False
        self._is_swallowed = False  # whether a `__del__` swallowed the exception of the last signal
        self._is_late = False  # whether the deadline is over, and this process lives on
        self._timer: threading.Timer | None = None
        self._report = sys.unraisablehook
        sys.unraisablehook = self._note_unraisable
        # A terminal that is closed cannot be written to any more.
        self._terminals = [each for each in (1, 2) if os.isatty(each)]
        for which in SIGNALS:
            # `nohup` ignores SIGHUP, so that the run continues.
            if which is not signal.SIGHUP or signal.getsignal(which) is not signal.SIG_IGN:
                signal.signal(which, self._note)

    @property
    def reason(self) -> str:
        """Return the signal or the setting that asked the run to stop."""
        return self._requested.name if self._requested else f"trainer.max_hours={self._hours:g}"

    @property
    def is_requested(self) -> bool:
        return self._requested is not None

    @property
    def is_person(self) -> bool:
        return self._requested is signal.SIGINT

    def check(self) -> None:
        """Raise KeyboardInterrupt, at every call, after a signal or the end of the time limit."""
        if self._requested is not None or time.monotonic() >= self._ends_s:
            raise KeyboardInterrupt

    def end_after(self, *, hours: float) -> None:
        """Have `check` raise once `hours` have passed from now."""
        self._hours, self._ends_s = hours, time.monotonic() + 3600 * hours

    @contextmanager
    def hold(self, *, deadline_s: float) -> Iterator[None]:
        """Let a signal raise only in `check`; the process has `deadline_s` to end after it."""
        self._is_held, self._patience_s = True, deadline_s
        try:
            yield
        finally:
            self._is_held, self._patience_s = False, _PATIENCE_S

    def arm(self) -> None:
        """After a signal, start the timer that kills the processes at the deadline."""
        if self._requested is not None:
            self._timer = threading.Timer(self._patience_s, self._end_late)
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        """Cancel the timer, so that the following code may take its time."""
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if signum == signal.SIGHUP:
            self._leave_terminals()
        if self._requested is None:
            self._requested, self._requested_s = signal.Signals(signum), time.monotonic()
            self.arm()
        elif not self._is_swallowed:
            if self._is_late or time.monotonic() - self._requested_s >= _SAME_SIGNAL_S:
                self._end_now()
            return
        self._is_swallowed = False
        if not self._is_held:
            raise KeyboardInterrupt

    def _end_late(self) -> None:
        print(
            f"the run did not end within {self._patience_s:g} s of its signal; thread stacks:",
            file=sys.stderr,
        )
        faulthandler.dump_traceback(all_threads=True)
        if self._others is None:
            self._end_now()
        self._is_late = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def _end_now(self) -> None:
        """End the run's processes; then this one, or raise KeyboardInterrupt if it lives on."""
        for process in psutil.Process().children(recursive=True):
            if self._others is None or process not in self._others:
                process.kill()
        if self._others is None:
            os._exit(EXIT_STATUS)
        self.disarm()
        raise KeyboardInterrupt

    def _leave_terminals(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for terminal in self._terminals:
            os.dup2(nowhere, terminal)
        os.close(nowhere)

    def _note_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Send the signal again if Python has dropped its KeyboardInterrupt."""
        if self._requested is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._report(unraisable)
            return
        self._is_swallowed = True
        main = threading.main_thread().ident
        again = threading.Timer(_AGAIN_S, signal.pthread_kill, [main, self._requested])
        again.daemon = True
        again.start()


@contextmanager
def block_signals() -> Iterator[None]:
    """Start processes within this context with SIGNALS blocked; they inherit the mask.

    A scheduler sends its signal to every process of a job. Ray's processes would end, and no
    checkpoint could be written. They are ended with SIGKILL, which cannot be blocked. Ray also
    replaces this process's handlers with one that ends the process; they are restored afterwards.
    A thread without the mask may still get a signal, for Ray's handler: raise KeyboardInterrupt.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers = {which: signal.getsignal(which) for which in SIGNALS}
    try:
        yield
    except SystemExit as ended:
        raise KeyboardInterrupt from ended
    finally:
        for which, handler in handlers.items():
            signal.signal(which, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
