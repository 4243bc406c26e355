"""A teacher on a server with OpenAI's API: log-probabilities of the policy's tokens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from openai import OpenAI, OpenAIError

from april_rl.config.teacher import TeacherConfig
from april_rl.errors import RunError
from april_rl.metrics import Metrics, Sum
from april_rl.types import Sample, SampleId, ScoredGroup

Floats32 = NDArray[np.float32]

_MAX_TRIED = 64  # tokens of the prompt that is compared with the server's tokenizer


class TeacherReply(NamedTuple):
    """The log-probabilities that a teacher gives to the samples of a step."""

    logprobs: Mapping[SampleId, Floats32]  # [R], nats
    metrics: Metrics


class TeacherServer:
    """Asks the server of `teacher.base_url`, which is not part of the run, about whole contexts.

    A request is a completion without new tokens whose prompt comes back with log-probabilities
    (`echo`). They are at temperature 1. A server that fails at every attempt ends the run, which
    can be resumed from its last checkpoint: without the teacher, tokens would be trained on their
    reward alone.
    """

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config
        key = config.api_key_env
        self._client = OpenAI(
            base_url=config.base_url,
            api_key="none" if key is None else os.environ[key],
            timeout=config.timeout_s,
            max_retries=config.max_retries,
        )

    def __str__(self) -> str:
        return f"teacher.base_url={self._config.base_url}, model {self._config.model}"

    def logprobs(self, groups: Sequence[ScoredGroup]) -> TeacherReply:
        """Return the log-probabilities of all response tokens. Raise RunError when the server
        fails.
        """
        began = time.perf_counter()
        samples = [sample for scored in groups for sample in scored.group.samples]
        contexts = [ids for sample in samples for ids in _contexts(sample)]
        threads = ThreadPoolExecutor(self._config.concurrency)
        try:
            scored = iter(list(threads.map(self._of_context, contexts)))
        finally:
            threads.shutdown(cancel_futures=True)
        found = {}
        for sample in samples:
            of_sample = np.concatenate([next(scored) for _ in sample.context_lengths])
            found[sample.id] = of_sample[np.frombuffer(sample.is_sampled, np.bool_)]
        return TeacherReply(found, Metrics({"time/teacher_s": Sum(time.perf_counter() - began)}))

    def check(self, prompt: Sequence[int], texts: Sequence[str], *, longest: int) -> None:
        """Try the server on the token ids of a prompt; `texts` is the text of each token by the
        policy's tokenizer, and `longest` the longest sequence of the run. Raise RunError when the
        server cannot be used, has another tokenizer, or cannot read sequences of that length.
        """
        most = self._longest()
        if most is not None and most < longest:
            raise RunError(
                f"{self} reads at most {most} tokens (max_model_len), and the run has sequences "
                f"of {longest}: start the server with a larger one, or lower "
                "rollout.max_response_tokens"
            )
        theirs = self._ask(prompt[:_MAX_TRIED])["tokens"]
        for place, (ours, text) in enumerate(zip(texts, theirs, strict=False)):
            # A part of a character has no text of its own.
            if ours.strip() != str(text).strip() and "\ufffd" not in f"{ours}{text}":
                raise RunError(
                    f"{self} has another tokenizer than model.path: token {prompt[place]} is "
                    f"{text!r} there and {ours!r} here. A teacher scores the policy's tokens, so "
                    "both need one tokenizer"
                )

    def _longest(self) -> int | None:
        """Return the longest sequence that the server says it reads; None if it says nothing."""
        with suppress(OpenAIError):
            for model in self._client.models.list():
                if model.id == self._config.model:
                    most = model.to_dict().get("max_model_len")
                    return most if isinstance(most, int) else None
        return None

    def _of_context(self, token_ids: Sequence[int]) -> Floats32:
        """Return the log-probability of every token; 0 for the first one, which has none."""
        found = self._ask(token_ids)["token_logprobs"][: len(token_ids)]
        numbers = [each if isinstance(each, int | float) else np.nan for each in found[1:]]
        values = np.array([0.0, *numbers], np.float32)
        if len(values) != len(token_ids) or not np.isfinite(values).all():
            raise RunError(
                f"{self} sent {len(found)} log-probabilities for {len(token_ids)} tokens, or one "
                "that is not a finite number"
            )
        return values

    def _ask(self, token_ids: Sequence[int]) -> dict[str, Any]:
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
            raw = self._client.post("/completions", body=request, cast_to=str)
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
