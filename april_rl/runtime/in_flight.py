"""Requests in flight on the engines: how long no engine has made a step, and the oldest request."""

from __future__ import annotations

import time
from collections.abc import Callable

from april_rl.rollout.requests import Requests
from april_rl.ticks import Tick
from april_rl.types import SampleId


class RequestsInFlight:
    """Requests from their launch until a tick finishes them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._requests: dict[SampleId, tuple[float, int, Requests]] = {}  # oldest first
        self._last_step_at = clock()

    def launch(self, engine: int, submit: Requests) -> None:
        """Add the requests of `submit`, which are sent to `engine`."""
        now = self._clock()
        if not self._requests:
            self._last_step_at = now
        sent = (now, engine, submit)
        for prompt_id, index in zip(submit.prompt_ids, submit.indices, strict=True):
            self._requests[SampleId(prompt_id, index)] = sent

    def record(self, tick: Tick) -> None:
        """Note the steps of a tick and remove the requests that it finished."""
        if tick.engine_steps:
            self._last_step_at = self._clock()
        for completion in tick.finished:
            self._requests.pop(completion.sample_id, None)

    def clear(self) -> None:
        """Remove every request."""
        self._requests.clear()

    @property
    def no_step_s(self) -> float:
        """Return for how long no engine has made a step while requests were in flight."""
        return self._clock() - self._last_step_at if self._requests else 0.0

    def describe_oldest(self) -> str:
        """Return a line about the request launched first; empty when none is in flight."""
        if not self._requests:
            return ""
        sample_id, (launched, engine, sent) = next(iter(self._requests.items()))
        requests = {request.sample_id: request for request in sent.each()}
        request = requests[sample_id]
        return (
            f"sample {request.sample_id.index} of prompt {request.sample_id.prompt_id}, on engine "
            f"{engine} for {self._clock() - launched:.1f} s, sent with {request.num_tokens} tokens "
            f"({request.start} of its response), {request.max_tokens} more allowed; "
            f"{len(self._requests)} requests in flight"
        )
