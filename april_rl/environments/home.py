"""A process with environments, as the controller sees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from uuid import uuid4

import psutil

from april_rl.environments.jobs import Answer, Ask, LetGo, Ready
from april_rl.environments.process import MARK, ProcessSettings, run_process
from april_rl.rewards.child_process import lifeline
from april_rl.rewards.mailbox import Mailbox
from april_rl.types import SampleId


class Home:
    """A running process; everything it says goes to a mailbox."""

    def __init__(
        self,
        settings: ProcessSettings,
        *,
        mailbox: Mailbox,
        arrived: Callable[[Home, Answer | str], None],
    ) -> None:
        """Start it. `arrived` is called by the mailbox with each answer, and at the end with what
        happened to the process.
        """
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._mark = uuid4().hex
        settings = replace(settings, mark=self._mark)
        self._process = context.Process(target=run_process, args=(theirs, settings, lifeline()))
        self._process.start()
        theirs.close()  # else its end would not be noticed
        self._mailbox, self._arrived = mailbox, arrived
        self.answered_s = time.monotonic()  # when it answered last
        self.is_leaving = False  # it gets no new episodes, and ends when it has answered
        # A process that is busy does not read; a thread waits for it.
        self._letters: SimpleQueue[Ask | LetGo | None] = SimpleQueue()
        for work in (self._listen, self._deliver):
            Thread(target=work, daemon=True).start()

    def ask(self, ask: Ask) -> None:
        """Send a question; nothing happens if the process has ended, which `arrived` hears."""
        self._letters.put(ask)

    def let_go(self, sample_id: SampleId) -> None:
        """Have the process forget an episode."""
        self._letters.put(LetGo(sample_id))

    def kill(self) -> None:
        """End the process, and every program that it has started."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):  # it has ended, or does not lead its group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._letters.put(None)
        self._kill_programs()

    def _kill_programs(self) -> None:
        """End the programs that have left the group of the process."""
        for program in psutil.process_iter():
            with suppress(psutil.Error):
                if program.environ().get(MARK) == self._mark:
                    program.kill()

    def _deliver(self) -> None:
        with suppress(OSError):  # the process has ended
            while (letter := self._letters.get()) is not None:
                self._connection.send(letter)

    def _listen(self) -> None:
        message, error = self._received(), ""
        while message is not None:
            if isinstance(message, Ready):
                error = message.error
            else:
                self._mailbox.put(partial(self._arrived, self, message))
            message = self._received()
        self._process.join()
        ended = (
            f"could not load it: {error}"
            if error
            else f"ended with exit code {self._process.exitcode}"
        )
        self._mailbox.put(partial(self._arrived, self, ended))

    def _received(self) -> Answer | Ready | None:
        """Return the next message; None when the process has ended."""
        try:
            message: Answer | Ready = self._connection.recv()
        except (EOFError, OSError):
            return None
        return message
