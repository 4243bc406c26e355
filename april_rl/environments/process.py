"""The work of a process with environments: one event loop, and many episodes on it."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from april_rl.environments.calls import Calls, path_of
from april_rl.environments.episode import Episode
from april_rl.environments.jobs import Answer, Ask, LetGo, Ready
from april_rl.environments.loading import load_class, new_environment
from april_rl.environments.protocol import Context
from april_rl.rewards.child_process import die_with_controller
from april_rl.rewards.plugins import Caught
from april_rl.types import SampleId

_MOST_THREADS = 1024  # calls under way that are not coroutines; hung ones keep theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of a process with environments."""

    function: str  # module:Class
    args: Mapping[str, Any]  # of its constructor
    step_timeout_s: float
    memory_bytes: int  # address space
    folder: Path  # for the calls of samples


def run_process(connection: Connection, settings: ProcessSettings, lifeline: Connection) -> None:
    """Load the class, report whether that worked, and answer until the controller ends.

    The process leads a group of its own, with the programs that an environment starts: they end
    with it.
    """
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
    die_with_controller(lifeline, with_group=True)
    with Caught() as caught:
        load_class(settings.function, settings.args)
    connection.send(Ready(caught.message))
    if not caught.message:
        asyncio.run(_Episodes(connection, settings).serve())


@dataclass(slots=True)
class _Episodes:
    """The episodes of this process, by sample."""

    connection: Connection
    settings: ProcessSettings
    alive: dict[SampleId, Episode] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # asyncio holds weak references

    async def serve(self) -> None:
        """Start a task for each question; end when the controller closes the connection."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
        while True:
            try:
                message = await asyncio.to_thread(self.connection.recv)
            except EOFError:
                return
            if isinstance(message, LetGo):
                self.alive.pop(message.sample_id, None)
                continue
            task = loop.create_task(self._answer(message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _answer(self, ask: Ask) -> None:
        episode = self.alive.get(ask.sample_id)
        if ask.row is not None:
            with Caught() as caught:
                episode = self.alive[ask.sample_id] = self._begun(ask)
            if caught.message:
                failed = Answer(
                    number=ask.number,
                    results=(),
                    outcome="error",
                    message=caught.message,
                    elapsed_s=0.0,
                )
                self.connection.send(failed)
                return
        assert episode is not None, f"there is no episode of sample {ask.sample_id}"
        self.connection.send(await episode.answered(ask))

    def _begun(self, ask: Ask) -> Episode:
        if ask.forgets_calls:
            path_of(self.settings.folder, ask.sample_id).unlink(missing_ok=True)
        calls = Calls(self.settings.folder, ask.sample_id)
        context = Context(sample_id=ask.sample_id, is_replay=bool(ask.turns), once=calls.once)
        made = new_environment(self.settings.function, self.settings.args, context)
        return Episode(made, calls, limit_s=self.settings.step_timeout_s)
