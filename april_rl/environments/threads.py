"""Calls of user code that is not a coroutine: a thread for each, with a time limit that begins when
the call does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from threading import Thread
from typing import Any

# Calls under way, without those that hang. Stacks of threads count as memory.
_MOST_CALLS = 256

_limit: ContextVar[asyncio.Timeout | None] = ContextVar("_limit", default=None)


@asynccontextmanager
async def limited(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError after `limit_s` seconds, without those in which `called` in this context
    waits for other calls to end.
    """
    async with asyncio.timeout(limit_s) as limit:
        token = _limit.set(limit)
        try:
            yield limit
        finally:
            _limit.reset(token)


class Threads:
    """The calls under way in this process."""

    def __init__(self) -> None:
        """Start without one."""
        self._free = asyncio.Semaphore(_MOST_CALLS)
        self.num_hung = 0  # calls that were given up and have not returned yet

    async def called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return what a function returns, called in a thread; raise what it raises. When it is
        cancelled, the thread continues and its result is lost.
        """
        await self._wait()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def end(result: Any, error: BaseException | None) -> None:  # noqa: ANN401
            if ended.cancelled():
                self.num_hung -= 1
            else:
                ended.set_result((result, error))

        def work(run: Callable[..., Any]) -> None:
            result, error = None, None
            try:
                result = run(function, *args, **kwargs)
            except BaseException as raised:  # whatever user code raises is its answer
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, result, error)

        try:
            Thread(target=work, args=(copy_context().run,), daemon=True).start()
            result, error = await ended
        except asyncio.CancelledError:
            self.num_hung += ended.cancelled()  # else it has returned in the same moment
            raise
        finally:
            self._free.release()
        if error is not None:
            raise _raisable(error)
        return result

    async def _wait(self) -> None:
        """Wait until there is room for a call; the time limit stands still."""
        limit = _limit.get()
        left_s = None
        if self._free.locked() and limit is not None and (at_s := limit.when()) is not None:
            left_s = at_s - asyncio.get_running_loop().time()
            limit.reschedule(None)
        await self._free.acquire()
        if limit is not None and left_s is not None:
            limit.reschedule(asyncio.get_running_loop().time() + left_s)


def _raisable(error: BaseException) -> BaseException:
    """Return an exception that a coroutine can raise, with the place where `error` was raised."""
    if not isinstance(error, StopIteration | GeneratorExit):
        return error
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    return RuntimeError(said).with_traceback(error.__traceback__)


threads = Threads()  # of this process: adapters and episodes share its room
