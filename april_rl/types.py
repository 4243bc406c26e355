"""The nouns of the system: prompt, request, completion, sample, group, score.

Legend: [P] prompt tokens, [R] response tokens, [G] samples of a group. Log-probabilities are in
nats, of the sampled token, at the sampling temperature, as the engine reported them when it sampled
the token.

All of them are values: nothing changes one that was made. What the controller makes for every
sample or group is no frozen dataclass, which takes four times as long to make.
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
Parts = tuple[tuple[str, float], ...]  # what each reward function gave, by name, unweighted


class SampleId(NamedTuple):
    """Which sample: the id of its prompt, and its place in the group.

    A tuple because every event of a rollout looks it up in several dictionaries.
    """

    prompt_id: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs of an id


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized question. `id` is its position in the endless stream: unique over the run, older
    is smaller.
    """

    id: int
    token_ids: tuple[int, ...]  # [P]
    text: str
    answer: str
    source: str  # file:line or data set:row, for messages to people
    dataset: str = ""  # name in data.sources; empty: there is one set only
    columns: Mapping[str, object] = field(default_factory=dict)  # what the reward asks for beside


class Sampling(NamedTuple):
    """How the tokens of a request are drawn where it is not as in training."""

    temperature: float
    top_p: float  # of the nucleus that tokens are drawn from (Holtzman et al. 2020); 1: all tokens


class Request(NamedTuple):
    """What an engine gets: go on from `token_ids` for at most `max_tokens` tokens.

    The tokens come in the parts they are held in, so that only the engine puts them together.
    """

    sample_id: SampleId
    prompt_token_ids: tuple[int, ...]  # [P]
    start: int  # response tokens the sample already has
    max_tokens: int  # what is left of the response budget
    seed: int
    parts: tuple[Sequence[int], ...] = ()  # of each completion so far; [start] in all
    sampling: Sampling | None = None  # None: at the engine's temperature, from all tokens

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the response so far [P + start], a new list."""
        return list(chain(self.prompt_token_ids, *self.parts))

    @property
    def num_tokens(self) -> int:
        """Of prompt and response so far, P + start."""
        return len(self.prompt_token_ids) + self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one request: a whole response, a part when `finish_reason` is
    None, or nothing when that is one of ENGINE_FAULTS.

    Engines give `array("i")` and `array("d")`: twelve or thirteen bytes a token wherever it is held
    or sent, where Python's numbers take seventy and are pickled one by one. Neither loses a bit.
    """

    sample_id: SampleId
    start: int  # response tokens the sample had when the request was made
    policy_version: int
    context_version: int  # the oldest policy whose KV cache the tokens were sampled with
    token_ids: Sequence[int]  # [R of this completion]
    logprobs: Sequence[float]  # behaviour_logprobs [R of this completion]
    finish_reason: FinishReason | None

    @property
    def is_kept(self) -> bool:
        """Whether the tokens were sampled on a cache that an earlier policy computed."""
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
    """One response to a prompt, grown by whole completions; unfinished while the last one is only a
    part.
    """

    prompt: Prompt
    index: int
    completions: tuple[Completion, ...]
    id: SampleId = field(init=False, repr=False)  # prompt id and index; every event asks for it
    num_tokens: int = field(init=False)  # of the response so far, R: where the last completion ends
    finish_reason: FinishReason | None = field(init=False)  # None while the sample is unfinished

    def __init__(
        self, prompt: Prompt, index: int, completions: tuple[Completion, ...] = ()
    ) -> None:
        """By hand: one that a dataclass makes takes twice as long to derive what is derived."""
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
        """The response [R], a new array."""
        response = array("i")
        for completion in self.completions:
            response.extend(completion.token_ids)
        return response

    @property
    def behaviour_logprobs(self) -> array[float]:
        """Nats, at the sampling temperature [R], a new array."""
        response = array("d")
        for completion in self.completions:
            response.extend(completion.logprobs)
        return response

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """The version that sampled each response token [R]."""
        return tuple(
            chain.from_iterable([c.policy_version] * len(c.token_ids) for c in self.completions)
        )

    @property
    def is_finished(self) -> bool:
        """Whether the engine ended the response, or its budget did."""
        return self.finish_reason is not None

    @property
    def is_failed(self) -> bool:
        """Return whether the engine has given up on the response: it must not be rewarded."""
        return self.finish_reason in ENGINE_FAULTS

    @property
    def oldest_version(self) -> int | None:
        """The version of the first sampled token; None before there is one."""
        return next((c.policy_version for c in self.completions if c.token_ids), None)

    def extended(self, completion: Completion) -> Sample:
        """The sample with one completion more; a completion that does not start where the sample
        ends is refused.
        """
        assert completion.sample_id == self.id, (completion.sample_id, self.id)
        assert self.finish_reason is None, (
            f"sample {self.id} is finished and got another completion"
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
        """Whether every sample is finished."""
        return all(sample.is_finished for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """The version of the group's oldest token; None before there is one."""
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


class Score(NamedTuple):
    """The reward of one finished sample, or why it has none.

    `scored` and `soft_timeout` have a value; with `soft_timeout` the reward itself gave up on this
    response in time. `no_score` (a reward function had no value for it), `timeout` and `crash` (the
    reward process was killed or died twice) have none.
    """

    sample_id: SampleId
    value: float | None  # None: there is no reward, and the group is dropped
    outcome: ScoreOutcome
    message: str = ""  # for people: why there is no value
    parts: Parts = ()  # values of several reward functions; `value` is their weighted sum


@dataclass(slots=True, kw_only=True)
class ScoredGroup:
    """A complete group with the reward of each sample."""

    group: Group
    rewards: tuple[float, ...]  # [G]
    parts: tuple[Parts, ...] = ()  # [G] with several reward functions, else none

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ: equal ones give no sample an advantage over its siblings."""
        return max(self.rewards) != min(self.rewards)
