"""The work of a process with environments: one event loop, and many episodes on it."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from april_rl.config.environment import EnvironmentConfig
from april_rl.config.secrets import forget_secrets
from april_rl.environments.calls import Calls, path_of
from april_rl.environments.commands import adopt_orphans
from april_rl.environments.door import repaired
from april_rl.environments.endpoint import Endpoint
from april_rl.environments.episode import Episode
from april_rl.environments.jobs import Answer, Ask, LetGo, Ready
from april_rl.environments.loading import environments_of
from april_rl.environments.protocol import Context
from april_rl.rewards.child_process import die_with_controller, limit_memory, raise_open_files
from april_rl.rewards.plugins import GIB, Caught
from april_rl.types import SampleId

MARK = "APRIL_RL_PROCESS"  # environment variable of the process and of all that it starts
_STACK_BYTES = 1 << 20  # of a thread; it counts as memory
_MOST_THREADS = 256  # that environments themselves may start by asyncio.to_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of a process with environments."""

    config: EnvironmentConfig
    folder: Path  # for the calls of samples
    mark: str = ""  # by which the programs that the process starts are known


def run_process(connection: Connection, settings: ProcessSettings, lifeline: Connection) -> None:
    """Load the class, report whether that worked, and answer until the controller ends.

    The process leads a group of its own, with the programs that an environment starts: they end
    with it.
    """
    os.setsid()
    threading.stack_size(_STACK_BYTES)
    os.environ[MARK] = settings.mark
    limit_memory(int(settings.config.memory_gib * GIB))
    raise_open_files()
    die_with_controller(lifeline, with_group=True)
    forget_secrets(settings.config.secrets)
    if settings.config.command:
        adopt_orphans()
    with Caught() as caught:
        episodes = _Episodes(connection, settings)
    connection.send(Ready(caught.message))
    if not caught.message:
        asyncio.run(episodes.serve())


class _Episodes:
    """The episodes of this process, by sample."""

    def __init__(self, connection: Connection, settings: ProcessSettings) -> None:
        self._connection, self._settings = connection, settings
        self._new = environments_of(settings.config, Endpoint(settings.config.address))
        self._alive: dict[SampleId, Episode] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio holds weak references

    async def serve(self) -> None:
        """Start a task for each question; end when the controller closes the connection."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
        letters: asyncio.Queue[Ask | LetGo | None] = asyncio.Queue()

        def read() -> None:
            letter: Ask | LetGo | None = None
            while True:
                try:
                    letter = self._connection.recv()
                except EOFError:
                    letter = None
                loop.call_soon_threadsafe(letters.put_nowait, letter)
                if letter is None:
                    return

        Thread(target=read, daemon=True).start()
        while (letter := await letters.get()) is not None:
            if isinstance(letter, LetGo):
                self._forget(letter.sample_id)
                continue
            task = loop.create_task(self._answer(letter))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, ask: Ask) -> None:
        if ask.row is not None:
            self._forget(ask.sample_id)
            with Caught() as caught:
                self._alive[ask.sample_id] = self._episode(ask, ask.row["dataset"])
            if caught.message:
                self._connection.send(
                    Answer(
                        number=ask.number,
                        results=(),
                        outcome="error",
                        message=repaired(caught.message),
                        elapsed_s=0.0,
                    )
                )
                return
        self._connection.send(await self._alive[ask.sample_id].answered(ask))

    def _forget(self, sample_id: SampleId) -> None:
        episode = self._alive.pop(sample_id, None)
        if episode is not None:
            episode.close()

    def _episode(self, ask: Ask, dataset: str) -> Episode:
        config = self._settings.config
        calls = Calls(path_of(self._settings.folder, ask.sample_id, dataset))
        if ask.anew:
            calls.begin_anew()
        context = Context(sample_id=ask.sample_id, is_replay=bool(ask.turns), once=calls.once)
        build = partial(self._new, context)
        return Episode(
            build,
            calls,
            limit_s=config.step_timeout_s,
            max_tokens=config.max_observation_tokens,
        )
