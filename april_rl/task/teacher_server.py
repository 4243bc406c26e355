"""A teacher on a server with OpenAI's API: log-probabilities of the policy's tokens."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from contextlib import suppress
from itertools import pairwise
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from openai import AsyncOpenAI, OpenAIError

from april_rl.config.models_beside import TeacherConfig
from april_rl.errors import RunError
from april_rl.metrics import Metrics, Sum
from april_rl.training.batches import TeacherReply
from april_rl.types import Sample, ScoredGroup

Floats32 = NDArray[np.float32]

_TIMEOUT_S = 60.0  # of one attempt of a request
_MAX_RETRIES = 5  # after a time-out, a lost connection, or a status 429 or 5xx
_CONCURRENCY = 32  # requests that are sent at a time
_LOOK_S = 1.0  # longest time without a look at signals

T = TypeVar("T")


class TeacherServer:
    """Asks the server of `teacher.base_url`, which is not part of the run, about whole contexts.

    A request is a completion without new tokens whose prompt comes back with log-probabilities
    (`echo`). They are at temperature 1. A server that fails at every attempt ends the run, which
    can be resumed from its last checkpoint: without the teacher, tokens would be trained on their
    reward alone.
    """

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config
        # Requests run in a thread of their own, where they can be cancelled.
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=os.environ.get("TEACHER_API_KEY") or "none",
            timeout=_TIMEOUT_S,
            max_retries=_MAX_RETRIES,
        )

    def __str__(self) -> str:
        return f"teacher.base_url={self._config.base_url}, model {self._config.model}"

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        self._wait(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def logprobs(
        self, groups: Sequence[ScoredGroup], look: Callable[[], None] = lambda: None
    ) -> TeacherReply:
        """Return the log-probabilities of all response tokens. `look` is called every second, and
        what it raises cancels the requests. Raise RunError when the server fails.
        """
        began = time.perf_counter()
        samples = [sample for scored in groups for sample in scored.group.samples]
        contexts = [ids for sample in samples for ids in _contexts(sample)]
        scored = iter(self._wait(self._of_contexts(contexts), look))
        found = {}
        for sample in samples:
            of_sample = np.concatenate([next(scored) for _ in sample.context_lengths])
            found[sample.id] = of_sample[np.frombuffer(sample.is_sampled, np.bool_)]
        return TeacherReply(found, Metrics({"time/teacher_s": Sum(time.perf_counter() - began)}))

    def check(self, token_ids: Sequence[int], texts: Sequence[str], *, longest: int) -> None:
        """Try the server on token ids; `texts` is the text of each by the policy's tokenizer, and
        `longest` the longest sequence of the run. Raise RunError when the server cannot be used,
        has another tokenizer, or cannot read sequences of that length.
        """
        most = self._wait(self._longest())
        if most is not None and most < longest:
            raise RunError(
                f"{self} reads at most {most} tokens (max_model_len), and the run has sequences "
                f"of {longest}: start the server with a larger one, or lower "
                "rollout.max_response_tokens"
            )
        for start in range(0, len(token_ids), longest):
            part = token_ids[start : start + longest]
            theirs = self._wait(self._ask(part))["tokens"]
            for token_id, ours, text in zip(part, texts[start:], theirs, strict=False):
                # A part of a character has no text of its own.
                if ours.strip() != str(text).strip() and "\ufffd" not in ours:
                    raise RunError(
                        f"{self} has another tokenizer than model.path: token {token_id} is "
                        f"{text!r} there and {ours!r} here. A teacher scores the policy's tokens, "
                        "so both need one tokenizer"
                    )

    def _wait(self, work: Coroutine[Any, Any, T], look: Callable[[], None] = lambda: None) -> T:
        """Return the result of `work`; what `look` raises cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not futures.wait([future], timeout=_LOOK_S).done:
                look()
            return future.result()
        finally:
            future.cancel()

    async def _cancel_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.close()

    async def _longest(self) -> int | None:
        """Return the longest sequence that the server says it reads; None if it says nothing."""
        with suppress(OpenAIError):
            async for model in self._client.models.list():
                if model.id == self._config.model:
                    most = model.to_dict().get("max_model_len")
                    return most if isinstance(most, int) else None
        return None

    async def _of_contexts(self, contexts: Sequence[Sequence[int]]) -> list[Floats32]:
        free = asyncio.Semaphore(_CONCURRENCY)

        async def of_context(token_ids: Sequence[int]) -> Floats32:
            async with free:
                return await self._of_context(token_ids)

        asked = [asyncio.ensure_future(of_context(token_ids)) for token_ids in contexts]
        try:
            return await asyncio.gather(*asked)
        finally:
            for each in asked:  # after an error hundreds of requests may be left
                each.cancel()

    async def _of_context(self, token_ids: Sequence[int]) -> Floats32:
        """Return the log-probability of every token; 0 for the first one, which has none."""
        found = (await self._ask(token_ids))["token_logprobs"][: len(token_ids)]
        numbers = [each if isinstance(each, int | float) else np.nan for each in found[1:]]
        values = np.array([0.0, *numbers], np.float32)
        if len(values) != len(token_ids) or not np.isfinite(values).all():
            raise RunError(
                f"{self} sent {len(found)} log-probabilities for {len(token_ids)} tokens, or one "
                "that is not a finite number"
            )
        return values

    async def _ask(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return `logprobs` of the completion that echoes a prompt."""
        request = {
            "model": self._config.model,
            "prompt": list(token_ids),
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
            "temperature": 1.0,
        }
        try:
            raw = await self._client.post("/completions", body=request, cast_to=str)
        except OpenAIError as error:
            raise RunError(f"{self} failed: {error}") from error
        with suppress(ValueError, LookupError, TypeError):
            found: dict[str, Any] = json.loads(raw)["choices"][0]["logprobs"]
            if isinstance(found["token_logprobs"], list) and isinstance(found["tokens"], list):
                return found
        raise RunError(
            f"{self} sent no log-probabilities of the prompt: it needs completions with echo and "
            f"logprobs, as vLLM's server has; it said {raw!r:.200}"
        )


def _contexts(sample: Sample) -> list[list[int]]:
    """Return the token ids of each context of a sample."""
    sequence = sample.sequence
    ends = np.cumsum([0, *sample.context_lengths]).tolist()
    return [sequence[start:end].tolist() for start, end in pairwise(ends)]
