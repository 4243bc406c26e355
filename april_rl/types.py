"""The types that cross module boundaries: prompt, request, completion, sample, group, score.

Legend: [P] prompt tokens, [R] response tokens, [G] samples of a group. Log-probabilities are those
of the sampled token, in nats, at the sampling temperature, as the engine reported them when it
sampled the token.

All are values and are never changed after they are made. The types that the controller makes for
every sample or group are not frozen dataclasses, because those take four times as long to make.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "nan_logprobs", "no_tokens", "engine_error"]
# The finish reasons of a response that the engine failed to sample, in words. It has no reward.
ENGINE_FAULTS: Mapping[str, str] = {
    "nan_logprobs": "the engine's log-probabilities are not finite",
    "no_tokens": "the engine ended the response without a token",
    "engine_error": "the engine ended the request with an error",
}
ScoreOutcome = Literal["scored", "soft_timeout", "no_score", "timeout", "crash"]
Parts = tuple[tuple[str, float], ...]  # (name of the reward function, its unweighted value)


class SampleId(NamedTuple):
    """Identifier of a sample: the id of its prompt and its index in the group.

    A tuple, because every event of a rollout uses it as a key of several dictionaries.
    """

    prompt_id: int
    index: int  # type: ignore[assignment]  # replaces the method tuple.index, which is not needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized question.

    `id` is its position in the endless stream of prompts: unique over the run, smaller for older
    prompts.
    """

    id: int
    token_ids: tuple[int, ...]  # [P]
    text: str
    answer: str
    source: str  # file:line or data set:row, for messages
    dataset: str = ""  # name in data.sources; empty when there is one data set
    columns: Mapping[str, object] = field(default_factory=dict)  # for the reward functions


class Sampling(NamedTuple):
    """Sampling parameters of a request that differ from training."""

    temperature: float
    top_p: float  # nucleus sampling (Holtzman et al. 2020); 1 draws from all tokens


class Request(NamedTuple):
    """Request to an engine: continue `token_ids` for at most `max_tokens` tokens.

    The tokens stay in separate parts, so that only the engine concatenates them.
    """

    sample_id: SampleId
    prompt_token_ids: tuple[int, ...]  # [P]
    start: int  # response tokens the sample already has
    max_tokens: int  # what remains of the response budget
    seed: int
    parts: tuple[Sequence[int], ...] = ()  # tokens of each completion so far; [start] in total
    sampling: Sampling | None = None  # None: the engine's temperature and all tokens

    @property
    def token_ids(self) -> list[int]:
        """Return the prompt and the response so far [P + start] as a new list."""
        return list(chain(self.prompt_token_ids, *self.parts))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the prompt and the response so far, P + start."""
        return len(self.prompt_token_ids) + self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one request to an engine: a whole response, or a part when `finish_reason` is
    None.

    Engines return `array("i")` and `array("d")`: 12 or 13 bytes per token in memory and in transit,
    where Python numbers take 70 and are pickled one by one. Neither loses precision.
    """

    sample_id: SampleId
    start: int  # response tokens the sample had when the request was made
    policy_version: int
    context_version: int  # the oldest policy that computed part of the KV cache used
    token_ids: Sequence[int]  # [R of this completion]
    logprobs: Sequence[float]  # behaviour_logprobs [R of this completion]
    finish_reason: FinishReason | None

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


@dataclass(slots=True, init=False)
class Sample:
    """One response to a prompt, made of completions; unfinished while its last completion is a
    part.
    """

    prompt: Prompt
    index: int
    completions: tuple[Completion, ...]
    id: SampleId = field(init=False, repr=False)  # stored because every event uses it
    num_tokens: int = field(init=False)  # response tokens so far, R
    finish_reason: FinishReason | None = field(init=False)  # None while the sample is unfinished

    def __init__(
        self, prompt: Prompt, index: int, completions: tuple[Completion, ...] = ()
    ) -> None:
        """Set the fields by hand; a dataclass's own method with `__post_init__` takes twice as
        long.
        """
        self.prompt, self.index, self.completions = prompt, index, completions
        if not completions:
            self.id, self.num_tokens, self.finish_reason = SampleId(prompt.id, index), 0, None
            return
        last = completions[-1]
        self.id = last.sample_id
        self.num_tokens = last.start + len(last.token_ids)
        self.finish_reason = last.finish_reason

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
    def policy_versions(self) -> tuple[int, ...]:
        """Return the policy version that sampled each response token [R]."""
        return tuple(
            chain.from_iterable([c.policy_version] * len(c.token_ids) for c in self.completions)
        )

    @property
    def is_finished(self) -> bool:
        """Return whether the engine ended the response or its token budget is used up."""
        return self.finish_reason is not None

    @property
    def is_failed(self) -> bool:
        """Return whether the engine has given up on the response: it must not be rewarded."""
        return self.finish_reason in ENGINE_FAULTS

    @property
    def oldest_version(self) -> int | None:
        """Return the version that sampled the first token, or None before there is one."""
        return next((c.policy_version for c in self.completions if c.token_ids), None)

    def extended(self, completion: Completion) -> Sample:
        """Return the sample with one more completion.

        The sample must be unfinished, and the completion must start where the sample ends.
        """
        assert completion.sample_id == self.id, (completion.sample_id, self.id)
        assert self.finish_reason is None, (
            f"sample {self.id} is finished but got another completion"
        )
        assert completion.start == self.num_tokens, (self.id, completion.start, self.num_tokens)
        return Sample(
            prompt=self.prompt, index=self.index, completions=(*self.completions, completion)
        )


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
    message: str = ""  # why there is no value, for messages
    parts: Parts = ()  # with several reward functions; `value` is the weighted sum


@dataclass(slots=True, kw_only=True)
class ScoredGroup:
    """A complete group with the reward of each sample."""

    group: Group
    rewards: tuple[float, ...]  # [G]
    parts: tuple[Parts, ...] = ()  # [G] with several reward functions, else empty

    @property
    def has_signal(self) -> bool:
        """Return whether the rewards differ; equal rewards give every sample an advantage of
        zero.
        """
        return max(self.rewards) != min(self.rewards)
