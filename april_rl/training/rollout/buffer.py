"""Every group of a run: open and ready groups with their samples, ended groups only as counts.

Invariants, with the tests in tests/training/rollout that hold them:

- nothing lost: every opened group is in one state, and the counts add up after every step
  (test_collector_state.py);
- nothing twice: a group is trained once, and no sample of an ended group comes back
  (test_collector_invariants.py).

An example: a step needs N = 2 groups of G = 2 samples; α = 1.5 keeps C = 6 samples, so 3 groups, in
flight. Prompts are numbered; [x] is what the step trains.

    event                          in flight   parked   ready   trained
    step 1 opens 0, 1, 2           0 1 2       -        -       -
    1 complete and scored          0 2         -        1       -
      refill opens 3               0 2 3       -        1       -
    2 complete: N are ready        0 3         -        1 2     -
    the step stops                 -           0 3      -       1 2    [1 2]
    step 2 resumes 0 and 3, opens 4
                                   0 3 4       -        -       1 2
    0, 3 and 4 complete in a tick  -           -        0 3 4   1 2
    one more than N is ready       -           -        4       0 1 2 3    [0 3]
    step 3 opens 5, 6, 7           5 6 7       -        4       0 1 2 3

Group 0 has tokens of two versions; a rejected or dropped group leaves `in flight` and is counted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from april_rl.metrics import Metrics, Sum
from april_rl.training.rollout.codec import (
    Plain,
    restore_open_group,
    restore_ready_group,
    save_open_group,
    save_ready_group,
)
from april_rl.training.rollout.open_group import Failure, OpenGroup, SampleState
from april_rl.training.rollout.record import GroupEvents, GroupState, Settled
from april_rl.training.rollout.stop_rule import Lost
from april_rl.types import Completion, Prompt, Sample, ScoredGroup, Span

_FINAL = (GroupState.trained, GroupState.rejected, GroupState.dropped)
_TOKEN_BYTES = 12  # int32 of the token id and float64 of its log-probability


class LedgerError(AssertionError):
    """A group or one of its samples was lost, counted twice, or moved in an illegal way."""


class Buffer:
    """Every group of a run, by the id of its prompt while it is live.

    An open group is in flight while a step is under way and parked between two steps. It becomes
    ready, rejected or dropped; a ready one becomes trained. A group has no other moves.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.events = GroupEvents()  # what happened since groups were trained last
        self._open: dict[int, OpenGroup] = {}  # in the order they were opened: oldest prompt first
        self._ready: dict[int, ScoredGroup] = {}
        self.is_step_under_way = False  # open groups are in flight, otherwise parked
        self._opened = 0
        self._ended: Counter[GroupState] = Counter()
        self._drop_reasons: Counter[str] = Counter()

    def open(self, prompt: Prompt) -> OpenGroup:
        """Add a new group, whose samples wait or act; raise LedgerError if its prompt has one."""
        if prompt.id in self._open or prompt.id in self._ready:
            raise LedgerError(f"prompt {prompt.id} was opened twice")
        group = self._open[prompt.id] = OpenGroup(prompt, self.group_size)
        self._opened += 1
        self.events.opened.append(prompt.id)
        return group

    def make_ready(self, scored: ScoredGroup) -> None:
        """Turn an open group into a ready one; raise LedgerError if it is not open."""
        self._settle(scored.group.prompt.id, GroupState.ready)
        self._ready[scored.group.prompt.id] = scored

    def reject(self, scored: ScoredGroup) -> None:
        """End an open group that is not worth training; raise LedgerError if it is not open."""
        self._settle(scored.group.prompt.id, GroupState.rejected)
        self._ended[GroupState.rejected] += 1
        self.events.lost.rejected += 1

    def drop(self, failure: Failure) -> None:
        """End an open group that has no rewards; raise LedgerError if it is not open."""
        prompt_id, index = failure.sample_id
        self._settle(prompt_id, GroupState.dropped)
        self._ended[GroupState.dropped] += 1
        self._drop_reasons[failure.reason] += 1
        self.events.lost.dropped += 1
        self.events.lost.last_failure = f"sample {index} of prompt {prompt_id}: {failure.message}"

    def _settle(self, prompt_id: int, state: GroupState) -> None:
        group = self._open.pop(prompt_id, None)
        if group is None:
            raise LedgerError(f"prompt {prompt_id} is not open and cannot become {state.value}")
        self.events.settled.append(Settled(prompt_id, state, group.lengths))

    def train(self, groups: Sequence[ScoredGroup]) -> GroupEvents:
        """Remove ready groups that will be trained; return the events of groups so far."""
        for scored in groups:
            if self._ready.pop(scored.group.prompt.id, None) is None:
                raise LedgerError(f"prompt {scored.group.prompt.id} is trained and was not ready")
            self._ended[GroupState.trained] += 1
        self.check()
        events, self.events = replace(self.events, trained=groups), GroupEvents()
        return events

    def take_back(self, events: GroupEvents) -> None:
        """Undo `train`, whose result was `events`: its groups are ready again."""
        for scored in events.trained:
            self._ready[scored.group.prompt.id] = scored
            self._ended[GroupState.trained] -= 1
        self.events = replace(events, trained=())
        self.check()

    def check(self) -> None:
        """Raise LedgerError unless every group that was opened is in one place."""
        if twice := self._open.keys() & self._ready.keys():
            raise LedgerError(f"prompts {sorted(twice)[:5]} are open and ready")
        counts = self.counts()
        if sum(counts.values()) != self._opened:
            found = ", ".join(f"{number} {state.value}" for state, number in counts.items())
            raise LedgerError(f"{self._opened} prompts were opened, but there are {found}")

    def counts(self) -> dict[GroupState, int]:
        """Return how many groups are in each state."""
        num_open, is_under_way = len(self._open), self.is_step_under_way
        return {
            GroupState.in_flight: num_open if is_under_way else 0,
            GroupState.parked: 0 if is_under_way else num_open,
            GroupState.ready: len(self._ready),
            **{state: self._ended[state] for state in _FINAL},
        }

    @property
    def drop_reasons(self) -> dict[str, int]:
        return dict(self._drop_reasons)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_live(self) -> int:
        return len(self._open) + len(self._ready)

    @property
    def open_tokens(self) -> int:
        return sum(sum(group.lengths) for group in self._open.values())

    @property
    def has_missing_replies(self) -> bool:
        """Return whether a complete group waits for scores, or a sample for its environment."""
        return any(
            group.is_complete or SampleState.acting in group.states for group in self._open.values()
        )

    @property
    def num_beginning(self) -> int:
        """Return how many samples wait for the first message of their environment."""
        groups = (group for group in self._open.values() if group.prompt.has_environment)
        return sum(group.spans.count(()) for group in groups)

    def group(self, prompt_id: int) -> OpenGroup | None:
        return self._open.get(prompt_id)

    def open_groups(self) -> Iterator[OpenGroup]:
        """Return the open groups, oldest prompt first."""
        return iter(self._open.values())

    def ready_groups(self) -> list[ScoredGroup]:
        """Return the ready groups, oldest token first."""
        return sorted(self._ready.values(), key=_age_order)

    def open_versions(self, *, policy_version: int) -> Counter[int]:
        """Count open groups by their oldest token's version; without tokens: `policy_version`."""
        return Counter(
            policy_version if group.oldest_version is None else group.oldest_version
            for group in self._open.values()
        )

    def ready_versions(self) -> Counter[int]:
        """Count ready groups by the version of their oldest token."""
        return Counter(scored.group.oldest_version or 0 for scored in self._ready.values())

    def fresh_samples(self, policy_version: int, *, limit: int) -> list[Sample]:
        """Return up to `limit` samples, shortest first, with a KV cache of this version alone."""
        fresh = [
            (len(group.prompt.token_ids) + end, prompt_id, index)
            for prompt_id, group in self._open.items()
            for index, (end, spans) in enumerate(zip(group.ends, group.spans, strict=True))
            if _is_fresh(spans, policy_version)
        ]
        opened = [
            self._open[prompt_id].sample(index)
            for _, prompt_id, index in heapq.nsmallest(limit, fresh)
        ]
        ready = [
            sample
            for scored in self.ready_groups()
            for sample in scored.group.samples
            if _is_fresh(sample.spans, policy_version)
        ]
        return heapq.nsmallest(limit, [*opened, *ready], key=_sequence_length)

    def metrics(self) -> Metrics:
        """Return `ledger/*`, the number of groups in each state, and the sizes of the buffer."""
        ready = [scored.group for scored in self._ready.values()]
        held = sum(sum(group.ends) for group in self._open.values())
        held += sum(sample.end for group in ready for sample in group.samples)
        return Metrics(
            {
                "rollout/parked_groups": Sum(len(self._open)),
                "rollout/parked_tokens": Sum(self.open_tokens),
                "rollout/ready_groups": Sum(len(self._ready)),
                "memory/buffer_bytes": Sum(_TOKEN_BYTES * held),
                "ledger/opened": Sum(self._opened),
                **{f"ledger/{state.value}": Sum(n) for state, n in self.counts().items()},
            }
        )

    def save(self) -> Plain:
        """Return everything as plain data; only between steps."""
        assert not self.is_step_under_way, "a buffer is saved between steps"
        counts = {state.value: number for state, number in self.counts().items()}
        return {
            "ledger": {"opened": self._opened, **counts},
            "drop_reasons": self.drop_reasons,
            "buffer": {
                "open": [save_open_group(group) for group in self._open.values()],
                "ready": [save_ready_group(scored) for scored in self.ready_groups()],
            },
            "events": {
                "opened": list(self.events.opened),
                "settled": [
                    [prompt_id, state.value, list(lengths)]
                    for prompt_id, state, lengths in self.events.settled
                ],
                "last_failure": self.events.lost.last_failure,
            },
        }

    def restore(self, state: Plain, *, num_engines: int, restarts_episodes: bool = False) -> None:
        """Fill an empty buffer by `restore_open_group`; raise LedgerError for wrong counts."""
        assert not self._opened, "a state is restored before the first step"
        opened = (
            restore_open_group(group, num_engines=num_engines, restarts_episodes=restarts_episodes)
            for group in state["buffer"]["open"]
        )
        self._open = {group.prompt.id: group for group in opened}
        ready = map(restore_ready_group, state["buffer"]["ready"])
        self._ready = {scored.group.prompt.id: scored for scored in ready}
        self._opened = state["ledger"]["opened"]
        self._ended = Counter({each: state["ledger"][each.value] for each in _FINAL})
        self._drop_reasons = Counter(state["drop_reasons"])
        self.events = _restore_events(state["events"])
        self.check()


def _restore_events(state: Plain) -> GroupEvents:
    settled = [
        Settled(prompt_id, GroupState(name), lengths)
        for prompt_id, name, lengths in state["settled"]
    ]
    became = Counter(each.state for each in settled)
    lost = Lost(
        rejected=became[GroupState.rejected],
        dropped=became[GroupState.dropped],
        last_failure=state["last_failure"],
    )
    return GroupEvents(opened=list(state["opened"]), settled=settled, lost=lost)


def _age_order(scored: ScoredGroup) -> tuple[int, int]:
    return scored.group.oldest_version or 0, scored.group.prompt.id


def _is_fresh(spans: Sequence[Span], policy_version: int) -> bool:
    """Return whether the last sampled tokens have a KV cache of this version alone."""
    last = next((span for span in reversed(spans) if isinstance(span, Completion)), None)
    return last is not None and last.context_version == policy_version


def _sequence_length(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + sample.end
