"""A process with environments, as the controller sees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

import psutil

from april_rl.config.runtime import UserCodeConfig
from april_rl.task.processes.child_process import lifeline, prepare
from april_rl.task.processes.mailbox import Mailbox
from april_rl.types import SampleId

_END_S = 1.0  # time in which a process ends after it has closed its pipe
MARK = "APRIL_RL_PROCESS"  # environment variable of the process and of everything that it starts


class Process:
    """A running process. Both directions carry lists of messages, so that many cost one write."""

    def __init__(
        self,
        serve: Callable[[Connection], None],
        limits: UserCodeConfig,
        *,
        mailbox: Mailbox,
        received: Callable[[Process, Any], None],
        ended: Callable[[Process, str], None],
    ) -> None:
        """Start the process, which calls `serve`. This function first sends the error from loading
        the user's code (or an empty text), and then lists of replies. The mailbox calls `received`
        with each reply, and `ended` with the reason when the process has ended.
        """
        self._mark = uuid4().hex
        self._connection, self._process = start(serve, limits, mark=self._mark)
        self._mailbox, self._on_reply, self._on_end = mailbox, received, ended
        self.replied_s = 0.0  # time of its last reply; 0 before the first
        self.num_failed = 0  # consecutive questions that have failed in it
        self.is_leaving = False  # it gets no new episodes and ends after its last reply
        self.sample_ids: set[SampleId] = set()  # the episodes that live in the process
        # A busy process does not read, so a thread waits for it.
        self._requests: SimpleQueue[Any] = SimpleQueue()
        for work in (self._receive, self._send):
            Thread(target=work, daemon=True).start()

    def send(self, request: object) -> None:
        """Send a request; do nothing if the process has ended, which is reported separately."""
        self._requests.put(request)

    def kill(self) -> None:
        """End the process, and every program that it has started."""
        kill(self._process)
        self._requests.put(None)
        for program in psutil.process_iter():  # find programs that have left the process group
            with suppress(psutil.Error):
                if program.environ().get(MARK) == self._mark:
                    program.kill()

    def _send(self) -> None:
        with suppress(OSError):  # the process has ended
            while True:
                requests = [self._requests.get()]
                while not self._requests.empty():
                    requests.append(self._requests.get())
                if None in requests:
                    return
                self._connection.send(requests)

    def _receive(self) -> None:
        error = ""
        with suppress(Exception):  # the process has ended, or user code has written into its pipe
            error = self._connection.recv()
            while True:
                for reply in self._connection.recv():
                    self._mailbox.put(partial(self._on_reply, self, reply))
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        reason = f"could not load it: {error}" if error else f"ended with exit code {code}"
        self._mailbox.put(partial(self._on_end, self, reason))


def start(
    serve: Callable[[Connection], None], limits: UserCodeConfig, *, mark: str = ""
) -> tuple[Connection, BaseProcess]:
    """Start a process that calls `serve` with one end of a pipe; return the other end."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    keywords = {"connection": theirs, "limits": limits, "mark": mark, "lifeline": lifeline()}
    process = context.Process(target=_run, args=(serve,), kwargs=keywords)
    process.start()
    theirs.close()  # otherwise the end of the process would not be noticed
    return ours, process


def kill(process: BaseProcess) -> None:
    """End a process with its group."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # it has ended, or does not lead its group yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _run(
    serve: Callable[[Connection], None],
    *,
    connection: Connection,
    limits: UserCodeConfig,
    mark: str,
    lifeline: Connection,
) -> None:
    os.setsid()
    os.environ[MARK] = mark
    # A process that user code forks, and that does not end, would send replies of its own.
    os.register_at_fork(after_in_child=connection.close)
    prepare(lifeline, limits)
    serve(connection)
