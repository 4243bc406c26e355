"""A group while its samples grow: what each sample has, where it is, and where it may go next.

    opened ──▶ waiting ──▶ running ──▶ finished ──▶ scored
                  ▲  └────┐   │ aborted
                  │       ▼   ▼
    next step ────┴────── parked ◀──── end of the step

    with an environment: opened ──▶ acting ──▶ waiting ──▶ running ──▶ acting ──▶ … ──▶ finished

A sample takes part in a step as *waiting* (no engine has it), *running* (an engine computes it, or
has it in its queue), *acting* (its environment has it), *finished* (its response ended) or
*scored*. Between two steps an unfinished sample is *parked*, with every token it has. A sample that
acts keeps acting: a call of a tool does not depend on the policy version.

Invariants, with the tests in tests/training/rollout that hold them:

- one length: tokens, log-probabilities and versions of a sample have one length
  (test_collector_invariants.py);
- one budget: the tokens that a resumed sample has and may still get add up to
  rollout.max_response_tokens (test_collector_invariants.py);
- legal moves only: `_MOVES`, which the table in docs/design.md repeats (test_open_group.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from april_rl.types import (
    ENGINE_FAULTS,
    Completion,
    Group,
    Observation,
    Prompt,
    Reply,
    Sample,
    SampleId,
    Score,
    ScoredGroup,
    Span,
)


class SampleState(Enum):
    """The state of a sample in an open group."""

    waiting = "waiting"  # it needs tokens, and no engine has it
    running = "running"  # an engine computes it or has it in its queue
    acting = "acting"  # its environment replies to its last turn, or begins
    parked = "parked"  # unfinished, between two steps
    finished = "finished"  # the response has ended and is not scored yet
    scored = "scored"  # its score is known, or its reward failed


_MOVES = {
    SampleState.waiting: {SampleState.running, SampleState.parked},
    SampleState.running: {SampleState.acting, SampleState.finished, SampleState.parked},
    SampleState.acting: {SampleState.waiting, SampleState.parked, SampleState.finished},
    SampleState.parked: {SampleState.waiting},
    SampleState.finished: {SampleState.scored},
    SampleState.scored: set[SampleState](),
}


class Failure(NamedTuple):
    """Why a group cannot be trained."""

    sample_id: SampleId  # the sample without a reward
    reason: str  # what the ledger counts it as
    message: str  # for people


class OpenGroup:
    """The G samples of one prompt until it is scored, as lists of length G: most events need one
    number of one sample.
    """

    def __init__(self, prompt: Prompt, group_size: int) -> None:
        self.prompt = prompt
        first = SampleState.acting if prompt.has_environment else SampleState.waiting
        self.states = [first] * group_size  # [G]; changed by `move` alone
        self.spans: list[tuple[Span, ...]] = [()] * group_size  # [G], each in order
        self.lengths = [0] * group_size  # response tokens so far [G]
        self.ends = [0] * group_size  # tokens of all spans, which is where the next one starts [G]
        # Preferred engine: it has the sample, or had it last and may keep its KV cache [G].
        self.engines: list[int | None] = [None] * group_size
        self.outstanding_tokens = [0.0] * group_size  # tokens that its engine still computes [G]
        self.scores: list[Score | None] = [None] * group_size  # [G]
        self.failure: Failure | None = None  # the first failure
        self.oldest_version: int | None = None  # policy version of the group's oldest token

    @property
    def is_complete(self) -> bool:
        return all(
            state is SampleState.finished or state is SampleState.scored for state in self.states
        )

    @property
    def is_scored(self) -> bool:
        return all(state is SampleState.scored for state in self.states)

    @property
    def samples(self) -> list[Sample]:
        return [self.sample(index) for index in range(len(self.states))]

    def sample(self, index: int) -> Sample:
        return Sample(self.prompt, index, self.spans[index])

    def indices(self, state: SampleState) -> list[int]:
        return [index for index, now in enumerate(self.states) if now is state]

    def sample_ids(self, state: SampleState) -> list[SampleId]:
        return [SampleId(self.prompt.id, index) for index in self.indices(state)]

    def move(self, index: int, to: SampleState) -> None:
        """Change a sample's state; raise AssertionError for an illegal move."""
        now = self.states[index]
        if to not in _MOVES[now]:
            raise AssertionError(
                f"sample {index} of prompt {self.prompt.id} cannot go from {now.value} to "
                f"{to.value}"
            )
        self.states[index] = to

    def move_all(self, now: SampleState, *, to: SampleState) -> None:
        """Change the state of every sample in the state `now`."""
        for index in self.indices(now):
            self.move(index, to)

    def assign(self, index: int, *, engine: int, expected_tokens: float) -> float:
        """Give a waiting sample to `engine`; return its prefill and `expected_tokens` in total."""
        self.move(index, SampleState.running)
        self.engines[index] = engine
        tokens = len(self.prompt.token_ids) + self.ends[index] + expected_tokens
        self.outstanding_tokens[index] = tokens
        return tokens

    def expects(self, completion: Completion, *, engine: int | None) -> bool:
        """Return whether a completion belongs to the sample's current request: it comes from the
        engine that has the sample (from any, if None) and starts where the sample ends.
        """
        index = completion.sample_id.index
        return (
            self.states[index] is SampleState.running
            and completion.start == self.ends[index]
            and engine in (None, self.engines[index])
        )

    def expects_reply(self, reply: Reply) -> bool:
        """Return whether a reply is to the sample's last turn."""
        index = reply.sample_id.index
        return self.states[index] is SampleState.acting and reply.start == self.ends[index]

    def extend(self, completion: Completion) -> bool:
        """Append a completion to a running sample; return whether that ends its turn. The sample
        is finished then, or acts if it has an environment and the engine has not given up on it.
        """
        index = completion.sample_id.index
        is_turn_over = completion.finish_reason is not None
        if not is_turn_over:
            self.move(index, SampleState.parked)
        elif self.prompt.has_environment and not completion.is_failed:
            self.move(index, SampleState.acting)
        else:
            self.move(index, SampleState.finished)
        if completion.token_ids or is_turn_over:  # otherwise the request never had a slot
            self._append(index, completion)
        return is_turn_over

    def observe(self, index: int, observation: Observation, *, unfinished: SampleState) -> None:
        """Append an observation to an acting sample: it becomes finished, or `unfinished`."""
        self.move(index, SampleState.finished if observation.is_final else unfinished)
        self._append(index, observation)

    def context_start(self, index: int) -> int:
        """Return where a sample's last context begins, in its prompt and its spans."""
        if not self.prompt.has_environment:
            return 0
        return sum(self.sample(index).context_lengths[:-1])

    def num_routed(self, index: int) -> int:
        """Return how many first tokens of a sample's last context have known experts."""
        found, end = 0, len(self.prompt.token_ids)
        for span in self.spans[index]:
            if isinstance(span, Observation) and span.begins_context:
                found = end = 0
            end += len(span.token_ids)
            if isinstance(span, Completion) and span.experts is not None:
                found = end - 1  # the engine has not read the last token
        return found

    def turn_tokens(self, index: int) -> int:
        """Return the response tokens of a sample's last turn so far."""
        spans, num_tokens = self.spans[index], 0
        for span in reversed(spans):
            if isinstance(span, Observation):
                break
            num_tokens += len(span.token_ids)
        return num_tokens

    def room(self, index: int, *, budget: int) -> int:
        """Return how many tokens a sample may get in this turn; `budget` is for all its turns."""
        room, last = budget - self.lengths[index], self._last_observation(index)
        limit = last.max_turn_tokens if last is not None else 0
        return min(room, limit - self.turn_tokens(index)) if limit else room

    def stop(self, index: int) -> tuple[str, ...]:
        """Return the texts that end a sample's turn."""
        last = self._last_observation(index)
        return last.stop if last is not None else ()

    def _last_observation(self, index: int) -> Observation | None:
        """Return the observation before a sample's turn."""
        if not self.prompt.has_environment:
            return None
        return next(span for span in reversed(self.spans[index]) if isinstance(span, Observation))

    def _append(self, index: int, span: Span) -> None:
        self.spans[index] += (span,)
        self.ends[index] += len(span.token_ids)
        if isinstance(span, Completion):
            self.lengths[index] += len(span.token_ids)
            if self.oldest_version is None and span.token_ids:
                self.oldest_version = span.policy_version  # later spans are not older
        self._note_fault(index)

    def _note_fault(self, index: int) -> None:
        """Remember why the group cannot be trained, if engine or environment has failed."""
        if self.failure is not None or not self.spans[index]:
            return
        sample_id, last = SampleId(self.prompt.id, index), self.spans[index][-1]
        if isinstance(last, Observation):
            if last.failure:
                self.failure = Failure(sample_id, "environment", last.failure)
        elif last.finish_reason is not None and last.is_failed:
            reason = last.finish_reason
            self.failure = Failure(sample_id, f"engine {reason}", ENGINE_FAULTS[reason])

    def add_score(self, score: Score) -> None:
        """Record the score of a finished sample; a second one changes nothing."""
        index = score.sample_id.index
        if self.states[index] is SampleState.scored:
            return
        self.move(index, SampleState.scored)
        self.scores[index] = score
        if self.failure is None and score.value is None:
            self.failure = Failure(score.sample_id, f"reward {score.outcome}", score.message)

    def to_scored(self, *, failed: float | None = None) -> ScoredGroup:
        """Return the group as a value, once every sample is scored. `failed` is the reward of
        samples whose engine or reward failed; None: there are none.
        """
        group = Group(prompt=self.prompt, samples=tuple(self.samples))
        scores = [score for score in self.scores if score is not None]
        values = [
            failed if sample.is_failed or score.value is None else score.value
            for sample, score in zip(group.samples, scores, strict=True)
        ]
        rewards = tuple(value for value in values if value is not None)
        assert len(rewards) == len(values), self.prompt.id
        parts = tuple(score.parts for score in scores)
        return ScoredGroup(group=group, rewards=rewards, parts=parts if any(parts) else ())

    @classmethod
    def restore(
        cls,
        group: Group,
        *,
        engines: Iterable[int | None],
        scores: Iterable[Score],
    ) -> OpenGroup:
        """Return a group as it was between two steps."""
        opened = cls(group.prompt, len(group.samples))
        opened.engines = list(engines)
        opened.oldest_version = group.oldest_version
        for sample in group.samples:
            opened.spans[sample.index] = sample.spans
            opened.lengths[sample.index], opened.ends[sample.index] = sample.num_tokens, sample.end
            opened.states[sample.index] = _state_between_steps(sample)
            opened._note_fault(sample.index)
        for score in scores:
            opened.add_score(score)
        return opened


def _state_between_steps(sample: Sample) -> SampleState:
    if sample.is_finished:
        return SampleState.finished
    return SampleState.acting if sample.is_acting else SampleState.parked
