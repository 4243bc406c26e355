"""The record of one step's rollout, for metrics and the timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from april_rl.training.rollout.open_group import OpenGroup, SampleState
from april_rl.training.rollout.stop_rule import Lost
from april_rl.training.rollout.ticks import Tick
from april_rl.types import ENGINE_FAULTS, Completion, FinishReason, Reply, SampleId, ScoredGroup

Awaited = Literal["ticks", "scores", "abort"]


class GroupState(Enum):
    """The state of a group. The first three are live, the others final."""

    in_flight = "in_flight"  # being generated or scored in this step
    parked = "parked"  # it outlived its step: unfinished, or finished and not yet scored
    ready = "ready"  # complete and scored, waiting to be trained
    trained = "trained"
    rejected = "rejected"  # no signal
    dropped = "dropped"  # a reward, environment or engine failed


class Settled(NamedTuple):
    """A group whose scores are all known."""

    prompt_id: int
    state: GroupState  # the new state: ready, rejected or dropped
    lengths: Sequence[int]  # response tokens [G]


@dataclass(slots=True, kw_only=True)
class GroupEvents:
    """Events of groups since the last training, also between steps and in interrupted ones."""

    opened: list[int] = field(default_factory=list)  # prompt ids, increasing
    settled: list[Settled] = field(default_factory=list)
    lost: Lost = field(default_factory=Lost)  # lost groups among `settled`, for the stop rule
    trained: Sequence[ScoredGroup] = ()


class Sent(NamedTuple):
    """The samples that went to an engine with one of its ticks, as prompt id and index."""

    engine: int
    slots: int  # requests that the engine computes together
    at_s: float
    sample_ids: Sequence[SampleId]


class Returned(NamedTuple):
    """A sample that came back from an engine where it had a slot."""

    sample_id: SampleId
    at_s: float
    prompt_tokens: int
    start: int  # tokens after its prompt that it already had
    tokens: int  # response tokens that came back with it
    response_tokens: int  # all its response tokens
    age: int  # steps since its first token
    finish_reason: FinishReason | None  # None: aborted
    is_resumed: bool  # whether the request continues in the middle of a turn
    is_kept: bool  # whether it continued with its old KV cache
    is_acting: bool  # whether its environment is to reply

    @property
    def is_finished(self) -> bool:
        reason = self.finish_reason
        return reason is not None and reason not in ENGINE_FAULTS and not self.is_acting


class Act(NamedTuple):
    """A time in which a sample waited for its environment, without a slot."""

    prompt_id: int
    sample: int  # index in the group
    begun_s: float  # when it began; 0: before the step
    ended_s: float  # when it ended; at the end of the rollout if it still waits
    is_finished: bool  # whether the reply finished it: no turn follows, without a failure


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """The events of one step's rollout, each kind in order; times are seconds since it began."""

    policy_version: int
    num_slots: int  # C
    clock: Callable[[], float]
    sent: list[Sent] = field(default_factory=list)
    ticks: list[tuple[int, Tick]] = field(default_factory=list)  # each with its engine
    returned: list[Returned] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    # Seconds in which the controller had nothing to do, by what it waited for.
    waited_s: defaultdict[Awaited, float] = field(default_factory=lambda: defaultdict(float))
    stop_s: float = 0.0  # from the end of generation until everything unfinished is parked
    time_s: float = 0.0  # duration of the whole rollout
    groups: GroupEvents = field(default_factory=GroupEvents)  # filled at the end
    _began: float = field(init=False)
    _asked_s: dict[SampleId, float] = field(init=False, default_factory=dict)  # start of acting

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def now_s(self) -> float:
        return self.clock() - self._began

    @contextmanager
    def waiting(self, what: Awaited) -> Iterator[None]:
        """Record the time in the context as a wait, also when it ends with an error."""
        began = self.clock()
        try:
            yield
        finally:
            self.waited_s[what] += self.clock() - began

    def send(self, engine: int, *, slots: int, sample_ids: Sequence[SampleId]) -> None:
        """Record that these samples go to `engine` now."""
        self.sent.append(Sent(engine, slots, self.now_s, sample_ids))

    def take_back(self, group: OpenGroup, completion: Completion) -> None:
        """Record that a sample comes back, unless it never had a slot; `group` has its tokens."""
        num_tokens = len(completion.token_ids)
        if not num_tokens and completion.finish_reason is None:
            return
        index, at_s = completion.sample_id.index, self.now_s
        is_acting = group.states[index] is SampleState.acting
        oldest, spans = group.sample(index).oldest_version, group.spans[index]
        self.returned.append(
            Returned(
                sample_id=completion.sample_id,
                at_s=at_s,
                prompt_tokens=len(group.prompt.token_ids),
                start=completion.start,
                tokens=num_tokens,
                response_tokens=group.lengths[index],
                age=0 if oldest is None else completion.policy_version - oldest,
                finish_reason=completion.finish_reason,
                is_resumed=len(spans) > 1 and isinstance(spans[-2], Completion),
                is_kept=completion.is_kept,
                is_acting=is_acting,
            )
        )
        if is_acting:
            self._asked_s[completion.sample_id] = at_s

    def ask(self, sample_ids: Iterable[SampleId]) -> None:
        """Record that samples wait for their environment; `take_back` does so after a turn."""
        self._asked_s |= dict.fromkeys(sample_ids, self.now_s)

    def observe(self, reply: Reply) -> None:
        """Record that the environment of a sample has replied."""
        sample_id, said = reply.sample_id, reply.observation
        is_finished = said.is_final and not said.failure
        self.acts.append(Act(*sample_id, self._asked_s.pop(sample_id), self.now_s, is_finished))

    def end(self, groups: GroupEvents) -> None:
        """Record the events of groups, and that the rollout ends now."""
        self.groups = groups
        self.time_s = self.now_s
        self.acts += [
            Act(*sample_id, asked_s, self.time_s, False)
            for sample_id, asked_s in self._asked_s.items()
        ]

    @property
    def controller_s(self) -> float:
        """Return the seconds of the controller's own work."""
        return self.time_s - sum(self.waited_s.values())

    @property
    def generated_tokens(self) -> int:
        """Return the response tokens of this step, including the tokens of parked samples."""
        return sum(each.tokens for each in self.returned)

    @property
    def finished_samples(self) -> int:
        in_one_turn = sum(each.is_finished for each in self.returned)
        return in_one_turn + sum(each.is_finished for each in self.acts)

    @property
    def reprefill_tokens(self) -> int:
        """Return the tokens that engines computed again because samples were resumed."""
        resumed = (each for each in self.returned if each.is_resumed and not each.is_kept)
        return sum(each.prompt_tokens + each.start for each in resumed)

    @property
    def in_flight_mean(self) -> float:
        """Return the number of requests in a slot, over all engines, averaged over the whole
        rollout: slots are empty while an engine has nothing to do, scores are awaited or the step
        stops. The last tick of each engine ends in the abort, so its slots count as empty.
        """
        slot_s = sum(
            tick.elapsed_s * tick.slot_steps / max(tick.engine_steps, 1) for _, tick in self.ticks
        )
        return slot_s / self.time_s if self.time_s else 0.0
