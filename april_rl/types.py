"""The types that cross module boundaries: prompt, completion, observation, sample, group, score.

Legend: [P] prompt tokens, [R] response tokens, [G] samples of a group. Log-probabilities are of the
sampled token, in nats, at the sampling temperature, as the engine reported them when it
sampled the token.

All are values and are never changed after they are made. The types that the controller makes for
every sample or group are not frozen dataclasses, because those take four times as long to make.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

FinishReason = Literal[
    "stop", "length", "nan_logprobs", "no_tokens", "engine_error", "environment_failed"
]
# Finish reasons of responses that the engine failed to sample, described in words. Such a response
# has no reward.
ENGINE_FAULTS: Mapping[str, str] = {
    "nan_logprobs": "the engine's log-probabilities are not finite",
    "no_tokens": "the engine ended the response without a token",
    "engine_error": "the engine ended it with an error, or it is too long for the engine",
}
FAULTS = {*ENGINE_FAULTS, "environment_failed"}
ScoreOutcome = Literal["scored", "soft_timeout", "no_score", "timeout", "crash"]
Message = Mapping[str, Any]  # chat message: role, content, other fields that templates read
# Called with a step and its row of metrics before the next step; the run ends when it returns True.
OnStep = Callable[[int, Mapping[str, float]], object]
Parts = tuple[tuple[str, float], ...]  # (name of the reward function, its unweighted value)


class SampleId(NamedTuple):
    """Identifier of a sample: the id of its prompt and its index in the group.

    A tuple, because every event of a rollout uses it as a key of several dictionaries.
    """

    prompt_id: int
    index: int  # type: ignore[assignment]  # replaces the method tuple.index, which is not needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized question."""

    id: int  # its position in the endless stream of prompts: unique, smaller for older ones
    token_ids: tuple[int, ...]  # [P]
    text: str
    answer: str
    source: str  # file:line or data set:row, for messages
    dataset: str = ""  # name in data.sources; empty if there is only one data set
    columns: Mapping[str, object] = field(default_factory=dict)  # for the reward functions
    has_environment: bool = False  # if false, a response is a single turn


class Experts(NamedTuple):
    """Experts that an engine's routers chose for consecutive tokens of a sample."""

    # Flat [tokens · layers · experts of a token]: 1 byte each, or 2 in a model with more than 256.
    numbers: array[int]
    num_layers: int  # layers of the whole model; numbers of layers without experts are meaningless
    num_chosen: int  # experts of a token in a layer

    @property
    def num_tokens(self) -> int:
        return len(self.numbers) // (self.num_layers * self.num_chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one request to an engine: a whole turn, or a part when `finish_reason` is None.
    Without an environment a response is one turn.

    Engines return `array("i")` and `array("d")`: 12 or 13 bytes per token in memory and in transit,
    where Python numbers take 70 and are pickled one by one. Neither loses precision.
    """

    sample_id: SampleId
    start: int  # tokens after the prompt that the sample had when the request was made
    policy_version: int
    context_version: int  # the oldest policy that computed part of the KV cache used
    token_ids: Sequence[int]  # [R of this completion]
    logprobs: Sequence[float]  # behaviour_logprobs [R of this completion]
    finish_reason: FinishReason | None
    # With learner.router_replay=engine, the experts of the tokens that the engine read for this
    # completion. They continue after the experts of earlier completions in the same context, and
    # stop before the last token.
    experts: Experts | None = None

    @property
    def is_kept(self) -> bool:
        """Return whether part of the KV cache used was computed by an earlier policy."""
        return self.context_version < self.policy_version

    @property
    def is_failed(self) -> bool:
        """Return whether the engine has given up on the response."""
        return self.finish_reason in ENGINE_FAULTS

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"sample {self.sample_id}: {len(self.token_ids)} tokens came with "
                f"{len(self.logprobs)} behaviour log-probabilities; the engine must report one for "
                "every sampled token"
            )


class Observation(NamedTuple):
    """Tokens that an environment adds before or after a turn: the policy reads them only."""

    token_ids: Sequence[int]
    is_final: bool = False  # no turn follows
    reward: float = 0.0  # reward of the turn before it
    failure: str = ""  # why the environment has failed, which makes it final
    begins_context: bool = False  # the policy reads these tokens in place of all earlier ones
    max_turn_tokens: int = 0  # limit of the next turn; 0: what is left of the budget
    stop: tuple[str, ...] = ()  # texts that end the next turn
    request_key: str = ""  # key of the agent's request that the next turn answers


Span = Completion | Observation


@dataclass(slots=True, init=False)
class Sample:
    """One response to a prompt: completions, and the observations of an environment between turns.

    Response tokens are the sampled ones. A sample is unfinished while its last span is a part of a
    turn and, with an environment, until the environment says that no turn follows.
    """

    prompt: Prompt
    index: int
    spans: tuple[Span, ...]
    id: SampleId = field(init=False, repr=False)  # stored because every event uses it
    num_tokens: int = field(init=False)  # response tokens so far, R
    end: int = field(init=False)  # tokens of all spans, which is where the next one starts
    finish_reason: FinishReason | None = field(init=False)  # None while the sample is unfinished

    def __init__(self, prompt: Prompt, index: int, spans: tuple[Span, ...] = ()) -> None:
        """Set the fields by hand: `__post_init__` would take twice as long."""
        self.prompt, self.index, self.spans = prompt, index, spans
        self.id = SampleId(prompt.id, index)
        self.num_tokens = self.end = 0
        for span in spans:
            self.end += len(span.token_ids)
            if isinstance(span, Completion):
                self.num_tokens += len(span.token_ids)
        self.finish_reason = _finish_reason(spans, has_environment=prompt.has_environment)

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the spans that engines sampled, in order."""
        return tuple(span for span in self.spans if isinstance(span, Completion))

    @property
    def sequence(self) -> array[int]:
        """Return the prompt and all spans [P + end] as a new array."""
        sequence = array("i", self.prompt.token_ids)
        for span in self.spans:
            sequence.extend(span.token_ids)
        return sequence

    @property
    def is_sampled(self) -> bytes:
        """Return for each token of `sequence` whether the policy sampled it [P + end], 0 or 1."""
        parts = (bytes([isinstance(s, Completion)]) * len(s.token_ids) for s in self.spans)
        return bytes(len(self.prompt.token_ids)) + b"".join(parts)

    @property
    def context_lengths(self) -> list[int]:
        """Return the number of tokens of each context in `sequence`, in order; no context reads
        the tokens of earlier ones.
        """
        lengths = [len(self.prompt.token_ids)]
        for span in self.spans:
            if isinstance(span, Observation) and span.begins_context:
                lengths.append(0)
            lengths[-1] += len(span.token_ids)
        return lengths

    @property
    def token_ids(self) -> array[int]:
        """Return the response [R] as a new array."""
        response = array("i")
        for completion in self.completions:
            response.extend(completion.token_ids)
        return response

    @property
    def behaviour_logprobs(self) -> array[float]:
        """Return the log-probabilities [R] as a new array; nats, at the sampling temperature."""
        response = array("d")
        for completion in self.completions:
            response.extend(completion.logprobs)
        return response

    @property
    def environment_reward(self) -> float:
        """Return the environment's reward, added up over the turns."""
        return math.fsum(span.reward for span in self.spans if isinstance(span, Observation))

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Return the policy version that sampled each response token [R]."""
        versions = ([c.policy_version] * len(c.token_ids) for c in self.completions)
        return tuple(chain.from_iterable(versions))

    @property
    def is_finished(self) -> bool:
        """Return whether the sample is complete."""
        return self.finish_reason is not None

    @property
    def is_acting(self) -> bool:
        """Return whether the environment has not replied to the last turn, or has not begun."""
        if self.is_finished or not self.prompt.has_environment:
            return False
        last = self.spans[-1] if self.spans else None
        return last is None or (isinstance(last, Completion) and last.finish_reason is not None)

    @property
    def is_failed(self) -> bool:
        """Return whether engine or environment has given up on the sample, which must not be
        rewarded.
        """
        return self.finish_reason in FAULTS

    @property
    def oldest_version(self) -> int | None:
        """Return the version that sampled the first token, or None before there is one."""
        return next((c.policy_version for c in self.completions if c.token_ids), None)

    def with_span(self, span: Span) -> Sample:
        """Return the sample with one more span.

        The sample must be unfinished, and a completion must start where the sample ends.
        """
        assert self.finish_reason is None, f"sample {self.id} is finished but got another span"
        if isinstance(span, Completion):
            assert span.sample_id == self.id, (span.sample_id, self.id)
            assert span.start == self.end, (self.id, span.start, self.end)
        return Sample(prompt=self.prompt, index=self.index, spans=(*self.spans, span))


class Reply(NamedTuple):
    """The observation with which an environment replies to the last turn of a sample."""

    sample_id: SampleId
    start: int  # tokens after the prompt that the sample had when the environment was asked
    observation: Observation


@dataclass(slots=True, kw_only=True)
class Group:
    """The G samples of one prompt: what is scheduled, filtered and trained together."""

    prompt: Prompt
    samples: tuple[Sample, ...]  # [G]

    @property
    def is_complete(self) -> bool:
        """Return whether every sample is finished."""
        return all(sample.is_finished for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """Return the version of the group's oldest token, or None before there is one."""
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


class Score(NamedTuple):
    """The reward of one finished sample, or the reason why it has none.

    The outcomes `scored` and `soft_timeout` have a value; with `soft_timeout` the reward function
    itself stopped at its time limit. `no_score` (a reward function returned no value), `timeout`
    and `crash` (the reward process was killed, or died twice) have none.
    """

    sample_id: SampleId
    value: float | None  # None: no reward; the group is dropped
    outcome: ScoreOutcome
    message: str = ""  # why there is no value
    parts: Parts = ()  # with several reward functions; `value` is the weighted sum


def differ(least: float, largest: float) -> bool:
    """Return whether rewards differ by more than rounding: 1e-6, or 1e-6 of the larger one."""
    return not math.isclose(least, largest, rel_tol=1e-6, abs_tol=1e-6)


@dataclass(slots=True, kw_only=True)
class ScoredGroup:
    """A complete group with the reward of each sample."""

    group: Group
    rewards: tuple[float, ...]  # [G]
    parts: tuple[Parts, ...] = ()  # [G] with several reward functions, else empty

    @property
    def has_signal(self) -> bool:
        """Return whether the rewards differ; dynamic sampling keeps such groups only."""
        return differ(min(self.rewards), max(self.rewards))


def _finish_reason(spans: Sequence[Span], *, has_environment: bool) -> FinishReason | None:
    """Return why a sample of these spans is finished; None while it is unfinished."""
    last = spans[-1] if spans else None
    if isinstance(last, Completion):
        has_reply = has_environment and not last.is_failed
        return None if has_reply else last.finish_reason
    if last is None or not last.is_final:
        return None
    if last.failure:
        return "environment_failed"
    return next(
        (span.finish_reason for span in reversed(spans) if isinstance(span, Completion)), "stop"
    )
