"""The buffer: every opened group is in one state, and the counts add up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from light_samples import PROMPT, completion

from april_rl.training.rollout.buffer import Buffer, LedgerError
from april_rl.training.rollout.open_group import Failure
from april_rl.training.rollout.record import GroupState
from april_rl.types import Group, Sample, SampleId, ScoredGroup

# For each event of a group: the states in which it may happen, and the state after it.
MOVES = {
    "open": ({None}, GroupState.in_flight),
    "make_ready": ({GroupState.in_flight}, GroupState.ready),
    "reject": ({GroupState.in_flight}, GroupState.rejected),
    "drop": ({GroupState.in_flight}, GroupState.dropped),
    "train": ({GroupState.ready}, GroupState.trained),
}
FINAL = {GroupState.trained, GroupState.rejected, GroupState.dropped}


def scored_group(prompt_id: int) -> ScoredGroup:
    """Return a group of one sample that is worth training."""
    prompt = replace(PROMPT, id=prompt_id)
    end = replace(completion(0, start=0, num_tokens=3, version=0), finish_reason="stop")
    sample = Sample(prompt, 0, (replace(end, sample_id=SampleId(prompt_id, 0)),))
    return ScoredGroup(group=Group(prompt=prompt, samples=(sample,)), rewards=(1.0,))


def let(buffer: Buffer, event: str, prompt_id: int) -> None:
    match event:
        case "open":
            buffer.open(replace(PROMPT, id=prompt_id))
        case "drop":
            buffer.drop(Failure(SampleId(prompt_id, 0), "test", "why"))
        case "train":
            buffer.train([scored_group(prompt_id)])
        case _:
            getattr(buffer, event)(scored_group(prompt_id))


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([*MOVES])), max_size=60))
def test_groups_make_only_legal_moves_and_the_counts_add_up(events):
    """Fails when a prompt is opened twice, a group is settled or trained that is not in the buffer,
    or a refused or final group is counted wrongly.
    """
    buffer, states, ended = Buffer(1), dict[int, GroupState | None](), list[GroupState]()
    buffer.is_step_under_way = True
    opened = 0
    for prompt_id, event in events:
        allowed, then = MOVES[event]
        if states.get(prompt_id) not in allowed:
            with pytest.raises(LedgerError, match=f"prompt {prompt_id} "):
                let(buffer, event, prompt_id)
        else:
            let(buffer, event, prompt_id)
            opened += event == "open"
            ended += [then] * (then in FINAL)
            states[prompt_id] = None if then in FINAL else then
        everything = [*states.values(), *ended]
        assert buffer.counts() == {state: everything.count(state) for state in GroupState}
        buffer.check()
    assert buffer.metrics().read()["ledger/opened"] == opened
    assert buffer.drop_reasons.get("test", 0) == ended.count(GroupState.dropped)


def test_open_groups_are_in_flight_in_a_step_and_parked_between_two():
    buffer = Buffer(1)
    buffer.is_step_under_way = True
    for prompt_id in range(3):
        let(buffer, "open", prompt_id)
    let(buffer, "make_ready", 1)
    buffer.is_step_under_way = False
    counts = buffer.counts()
    assert [counts[GroupState(s)] for s in ("in_flight", "parked", "ready")] == [0, 2, 1]
    buffer.is_step_under_way = True
    counts = buffer.counts()
    assert [counts[GroupState(s)] for s in ("in_flight", "parked", "ready")] == [2, 0, 1]


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("ledger", {"opened": 4}, "4 prompts were opened, but there are 0 in_flight, 1 parked"),
        ("ledger", {"trained": 1}, "3 prompts were opened, but"),
        ("buffer", {"open": []}, "0 parked, 1 ready"),
    ],
)
def test_a_state_with_a_missing_or_extra_group_is_refused(key, change, message):
    """Fails when a run continues from a checkpoint that lost a group or contains one twice."""
    buffer = Buffer(1)
    for prompt_id in range(3):
        let(buffer, "open", prompt_id)
    let(buffer, "make_ready", 1)
    let(buffer, "reject", 2)
    state = buffer.save()
    with pytest.raises(LedgerError, match=message):
        Buffer(1).restore({**state, key: {**state[key], **change}}, num_engines=1)
    twice = {**state["buffer"], "open": [{**state["buffer"]["open"][0]}]}
    twice["open"][0]["prompt"] = state["buffer"]["ready"][0]["prompt"]
    with pytest.raises(LedgerError, match=r"prompts \[1\] are open and ready"):
        Buffer(1).restore({**state, "buffer": twice}, num_engines=1)


def test_a_step_that_lost_a_group_fails():
    buffer = Buffer(1)
    for prompt_id in range(2):
        let(buffer, "open", prompt_id)
        let(buffer, "make_ready", prompt_id)
    del buffer._ready[1]
    with pytest.raises(LedgerError, match=r"2 prompts were opened, .* 1 trained"):
        let(buffer, "train", 0)


def test_the_end_of_each_group_is_reported_once_even_after_a_restart():
    """Fails when a group that was settled before a restart is forgotten or reported twice."""
    buffer = Buffer(1)
    for prompt_id in range(4):
        let(buffer, "open", prompt_id)
    for prompt_id, event in enumerate(("make_ready", "reject", "drop")):
        let(buffer, event, prompt_id)
    again = Buffer(1)
    again.restore(buffer.save(), num_engines=1)
    for each in (buffer, again):
        events = each.train([scored_group(0)])
        assert events.opened == [0, 1, 2, 3]
        assert [(s.prompt_id, s.state.value) for s in events.settled] == [
            (0, "ready"),
            (1, "rejected"),
            (2, "dropped"),
        ]
        assert (events.lost.rejected, events.lost.dropped) == (1, 1)
        assert events.lost.last_failure == "sample 0 of prompt 2: why"
        assert events.trained == [scored_group(0)]
        assert each.events.lost.total == len(each.events.settled) == 0
