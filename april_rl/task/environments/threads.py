"""Run user code that is not a coroutine in a thread for each call, with a time limit."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

# The limit of running calls; hung calls do not count. Stacks of threads count as memory.
_MOST_CALLS = 256

_limit: ContextVar[asyncio.Timeout | None] = ContextVar("_limit", default=None)


@asynccontextmanager
async def time_limit(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError after `limit_s` seconds, not counting the time in which `call` waits."""
    async with asyncio.timeout(limit_s) as limit:
        token = _limit.set(limit)
        try:
            yield limit
        finally:
            _limit.reset(token)


class Threads:
    """The running calls in this process."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_MOST_CALLS)
        # The executor starts a thread only when none is idle; hung calls do not count.
        self._threads = ThreadPoolExecutor(max_workers=1 << 16)
        self.num_hung = 0  # calls that were given up but have not returned yet

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call a function in a thread, which continues when this is cancelled."""
        await self._wait()
        loop = asyncio.get_running_loop()
        call = partial(_raising, copy_context().run, function, *args, **kwargs)
        try:
            called = self._threads.submit(call)
            return await asyncio.wrap_future(called)
        except asyncio.CancelledError:
            self.num_hung += 1
            called.add_done_callback(lambda _: loop.call_soon_threadsafe(self._on_return))
            raise
        finally:
            self._free.release()

    def _on_return(self) -> None:
        self.num_hung -= 1

    async def _wait(self) -> None:
        limit = _limit.get()
        left_s = None
        if self._free.locked() and limit is not None and (at_s := limit.when()) is not None:
            left_s = at_s - asyncio.get_running_loop().time()
            limit.reschedule(None)
        await self._free.acquire()
        if limit is not None and left_s is not None:
            limit.reschedule(asyncio.get_running_loop().time() + left_s)


def _raising(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Call a function; raise RuntimeError for an exception that a coroutine cannot raise."""
    try:
        return run(*args, **kwargs)
    except (StopIteration, GeneratorExit) as error:
        message = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise RuntimeError(message).with_traceback(error.__traceback__) from None


threads = Threads()  # shared by the adapters and episodes of this process


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Call a function of the user, in a thread unless it is a coroutine function."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    returned = await threads.call(function, *args, **kwargs)
    return await returned if inspect.isawaitable(returned) else returned
