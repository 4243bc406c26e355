"""The work of a process with environments: one event loop with many episodes."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from april_rl.config.environment import EnvironmentConfig
from april_rl.config.user_code import Caught
from april_rl.task.environments.agent.commands import adopt_orphans
from april_rl.task.environments.agent.endpoint import Endpoint
from april_rl.task.environments.calls import Calls, path_of
from april_rl.task.environments.door import repair
from april_rl.task.environments.episode import Episode, EpisodeReply, EpisodeRequest, Forget
from april_rl.task.environments.loading import environments_of
from april_rl.task.environments.protocol import Context
from april_rl.task.processes.child_process import raise_open_files
from april_rl.types import SampleId

_STACK_BYTES = 1 << 20  # stack of a thread, which counts as memory
_MOST_THREADS = 256  # threads that environments may start by asyncio.to_thread


def serve(config: EnvironmentConfig, folder: Path, connection: Connection) -> None:
    """Load the class, send the error or an empty text, and reply until the controller ends."""
    threading.stack_size(_STACK_BYTES)
    raise_open_files()
    if config.command:
        adopt_orphans()
    with Caught() as caught:
        episodes = _Episodes(connection, config, folder)
    connection.send(caught.message)
    if not caught.message:
        asyncio.run(episodes.serve())


class _Episodes:
    """The episodes of this process, by sample."""

    def __init__(self, connection: Connection, config: EnvironmentConfig, folder: Path) -> None:
        self._connection, self._config, self._folder = connection, config, folder
        self._pid = os.getpid()
        self._new = environments_of(config, Endpoint(config.address))
        self._alive: dict[SampleId, Episode] = {}
        # References to the tasks, because asyncio holds only weak ones.
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: list[EpisodeReply] = []  # replies that are sent together

    async def serve(self) -> None:
        """Start a task for each request; end when the controller closes the connection."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
        received: asyncio.Queue[list[EpisodeRequest | Forget]] = asyncio.Queue()

        def read() -> None:
            requests = None
            while requests != []:
                try:
                    requests = self._connection.recv()
                except EOFError:
                    requests = []
                loop.call_soon_threadsafe(received.put_nowait, requests)

        Thread(target=read, daemon=True).start()
        while requests := await received.get():
            for request in requests:
                if isinstance(request, Forget):
                    self._forget(request.sample_id)
                    continue
                task = loop.create_task(self._reply(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _reply(self, request: EpisodeRequest) -> None:
        try:
            await self._send_reply(request)
        finally:
            if os.getpid() != self._pid:
                # User code has forked this process, and the child returned from it. It must not
                # become a second loop over the same pipes.
                os._exit(1)

    async def _send_reply(self, request: EpisodeRequest) -> None:
        if request.row is not None:
            self._forget(request.sample_id)
            with Caught() as caught:
                self._alive[request.sample_id] = self._episode(request, request.row["dataset"])
            if caught.message:
                message = repair(caught.message)
                self._send(EpisodeReply(number=request.number, outcome="error", message=message))
                return
        self._send(await self._alive[request.sample_id].reply_to(request))

    def _send(self, reply: EpisodeReply) -> None:
        if not self._replies:
            asyncio.get_running_loop().call_soon(self._flush)
        self._replies.append(reply)

    def _flush(self) -> None:
        self._connection.send(self._replies)
        self._replies.clear()

    def _forget(self, sample_id: SampleId) -> None:
        episode = self._alive.pop(sample_id, None)
        if episode is not None:
            episode.close()

    def _episode(self, request: EpisodeRequest, dataset: str) -> Episode:
        calls = Calls(path_of(self._folder, request.sample_id, dataset))
        if request.calls_again:
            calls.start_over()
        is_replay = bool(request.turns)
        context = Context(sample_id=request.sample_id, is_replay=is_replay, once=calls.once)
        return Episode(partial(self._new, context), calls, self._config)
