"""Timeline of a step's rollout: when each sample was sent to an engine, when it came back and when
it waited for its environment, what work the engines did, and which groups were opened, settled and
trained. timeline/step_00010.json holds one, of each step whose samples are saved.

Times are seconds since the rollout began, with the resolution of an engine's ticks.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from april_rl.training.rollout.record import Act, Returned, StepRecord
from april_rl.training.rollout.ticks import TickWork
from april_rl.types import SampleId

_MAX_TICKS = 256  # ticks kept of a step, evenly spread


class Stay(NamedTuple):
    """One sample's stay on an engine during one step."""

    prompt_id: int
    sample: int  # index in the group
    engine: int
    sent_s: float  # when the request was sent, which may wait in the engine's queue
    ended_s: float  # when the completion came back
    start: int  # response tokens the sample already had
    tokens: int  # response tokens generated in this step
    age: int  # steps since the sample's first token
    outcome: Literal["finished", "acting", "parked"]  # acting: its environment is to reply
    is_resumed: bool  # whether the request continues in the middle of a turn


class GroupLengths(NamedTuple):
    """The response lengths of a group."""

    prompt_id: int
    lengths: tuple[int, ...]  # tokens [G]


class Bar(NamedTuple):
    """A stay and the engine slot that computed it."""

    stay: Stay
    slot: int  # counts from 0 over all engines
    begun_s: float  # when it left the engine's queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step's samples on engines or waiting for their environment, and the work of its ticks."""

    policy_version: int
    time_s: float  # duration of the whole rollout
    stop_s: float  # the part at its end that aborting and parking took
    slots: Mapping[int, int]  # number of slots of each engine
    stays: tuple[Stay, ...]  # in the order they were sent
    acts: tuple[Act, ...]  # in the order they began
    ticks: tuple[TickWork, ...]  # ticks that computed something, at most _MAX_TICKS
    opened: tuple[int, ...] = ()  # prompt ids of the groups that the step opened
    settled: tuple[GroupLengths, ...] = ()  # groups that became ready, rejected or dropped
    trained: tuple[GroupLengths, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the timeline as plain data for JSON, with times rounded to 0.1 ms or 1 µs."""
        stays = [
            (*stay[:3], round(stay.sent_s, 4), round(stay.ended_s, 4), *stay[5:])
            for stay in self.stays
        ]
        acts = [
            (*act[:2], round(act.begun_s, 4), round(act.ended_s, 4), act.is_finished)
            for act in self.acts
        ]
        ticks = [(*tick[:-1], round(tick.elapsed_s, 6)) for tick in self.ticks]
        fields = asdict(self) | {"slots": {str(e): n for e, n in self.slots.items()}}
        fields |= {"columns": Stay._fields, "tick_columns": TickWork._fields}
        fields |= {"act_columns": Act._fields}
        return fields | {"stays": stays, "acts": acts, "ticks": ticks}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Return the timeline of `plain`; raise KeyError, TypeError or ValueError."""
        return cls(
            policy_version=int(plain["policy_version"]),
            time_s=float(plain["time_s"]),
            stop_s=float(plain["stop_s"]),
            slots={int(engine): int(n) for engine, n in plain["slots"].items()},
            stays=tuple(Stay(*values) for values in plain["stays"]),
            acts=tuple(Act(*values) for values in plain["acts"]),
            ticks=tuple(TickWork(*values) for values in plain["ticks"]),
            opened=tuple(plain["opened"]),
            settled=_group_lengths(plain["settled"]),
            trained=_group_lengths(plain["trained"]),
        )

    def bars(self) -> Iterator[Bar]:
        """Yield every stay with its slot. Engines compute requests in the order they arrive: a
        request takes the slot that becomes free first.
        """
        first, free = 0, {}
        for engine, count in sorted(self.slots.items()):
            free[engine] = [(0.0, first + slot) for slot in range(count)]
            first += count
        # A queued request that was aborted before it ran has no stay; the others ran in order.
        for stay in self.stays:
            free_s, slot = heapq.heappop(free[stay.engine])
            begun_s = min(max(stay.sent_s, free_s), stay.ended_s)
            heapq.heappush(free[stay.engine], (stay.ended_s, slot))
            yield Bar(stay, slot, begun_s)


def timeline_of(record: StepRecord) -> Timeline:
    """Return the timeline of a step that has ended."""
    returned = defaultdict[SampleId, deque[Returned]](deque)  # one for each turn of the step
    for each in record.returned:
        returned[each.sample_id].append(each)
    stays = []
    for sent in record.sent:
        for sample_id in sorted(sent.sample_ids):
            if not returned[sample_id]:
                continue  # the request never had a slot, or its engine hung
            found = returned[sample_id].popleft()
            stays.append(
                Stay(
                    *sample_id,
                    engine=sent.engine,
                    sent_s=sent.at_s,
                    ended_s=found.at_s,
                    start=found.response_tokens - found.tokens,
                    tokens=found.tokens,
                    age=found.age,
                    outcome=_outcome(found),
                    is_resumed=found.is_resumed,
                )
            )
    ticks = [TickWork.of(tick) for _, tick in record.ticks if tick.engine_steps]
    return Timeline(
        policy_version=record.policy_version,
        time_s=record.time_s,
        stop_s=record.stop_s,
        slots={sent.engine: sent.slots for sent in record.sent},
        stays=tuple(stays),
        acts=tuple(sorted(record.acts, key=lambda act: act.begun_s)),
        ticks=tuple(ticks[:: -(-len(ticks) // _MAX_TICKS) or 1]),
        opened=tuple(record.groups.opened),
        settled=tuple(
            GroupLengths(each.prompt_id, tuple(each.lengths)) for each in record.groups.settled
        ),
        trained=tuple(
            GroupLengths(group.prompt.id, tuple(sample.num_tokens for sample in group.samples))
            for group in (scored.group for scored in record.groups.trained)
        ),
    )


def read_timeline(path: Path) -> Timeline:
    """Return the timeline in a file. Raises ValueError when it has none."""
    try:
        return Timeline.of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the timeline of a step ({error!r}): remove it") from error


def _group_lengths(plain: Sequence[Any]) -> tuple[GroupLengths, ...]:
    return tuple(GroupLengths(prompt_id, tuple(lengths)) for prompt_id, lengths in plain)


def _outcome(returned: Returned) -> Literal["finished", "acting", "parked"]:
    if returned.is_acting:
        return "acting"
    return "parked" if returned.finish_reason is None else "finished"
