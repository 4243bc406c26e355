"""What is in flight on the engines: the oldest request, and whether any engine gets on with it."""

from __future__ import annotations

import time
from collections.abc import Callable

from april_rl.rollout.requests import Requests
from april_rl.ticks import Tick
from april_rl.types import SampleId


class Flight:
    """Requests from their launch to the completion that ends them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` reads seconds."""
        self._clock = clock
        self._requests: dict[SampleId, tuple[float, int, Requests]] = {}  # the oldest first
        self._stepped = clock()

    def launch(self, engine: int, submit: Requests) -> None:
        """The requests of `submit` go to `engine`."""
        now = self._clock()
        if not self._requests:
            self._stepped = now
        sent = (now, engine, submit)
        for prompt_id, index in zip(submit.prompt_ids, submit.indices, strict=True):
            self._requests[SampleId(prompt_id, index)] = sent

    def absorb(self, tick: Tick) -> None:
        """A tick has ended."""
        if tick.engine_steps:
            self._stepped = self._clock()
        for completion in tick.finished:
            self._requests.pop(completion.sample_id, None)

    def abort(self) -> None:
        """Nothing is in flight any more."""
        self._requests.clear()

    @property
    def stuck_s(self) -> float:
        """For how long no engine has finished an engine step though requests are in flight."""
        return self._clock() - self._stepped if self._requests else 0.0

    def oldest(self) -> str:
        """In a line: the request that has been in flight for longest; empty when there is none."""
        if not self._requests:
            return ""
        sample_id, (launched, engine, sent) = next(iter(self._requests.items()))
        requests = {request.sample_id: request for request in sent.each()}
        request = requests[sample_id]
        return (
            f"sample {request.sample_id.index} of prompt {request.sample_id.prompt_id}, on engine "
            f"{engine} for {self._clock() - launched:.1f} s, sent with {request.num_tokens} "
            f"tokens ({request.start} of them of its response) and {request.max_tokens} to go; "
            f"{len(self._requests)} requests are in flight"
        )
