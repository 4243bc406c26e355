"""Which engine a sample goes to, which versions groups have, and when Python collects garbage."""

import gc
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_runs import Run, Setup, constant, lognormal

from april_rl.training.rollout.garbage_collection import garbage_collection_paused, imports_frozen
from april_rl.training.rollout.open_group import OpenGroup
from april_rl.training.rollout.slots import Slots
from april_rl.types import Group, SampleId


class PlainSlots:
    """The rule itself: the minimum over all offered engines with room."""

    def __init__(self, slots: Slots, *, num_engines: int, queue_size: int) -> None:
        self.slots, self.queue_size = slots, queue_size
        self.offered = set(range(num_engines))
        self.last: dict[SampleId, int] = {}
        self.siblings: dict[int, int] = {}
        self.held: dict[SampleId, tuple[int, float]] = {}

    def choose(self, sample_id: SampleId) -> int | None:
        return min(
            (e for e in self.offered if self.num_held(e) < self.most(e)),
            key=lambda e: (
                self.num_held(e) >= self.slots.slots(e),
                e != self.last.get(sample_id),
                e != self.siblings.get(sample_id.prompt_id),
                sum(cost for engine, cost in self.held.values() if engine == e),
                e,
            ),
            default=None,
        )

    def num_held(self, engine: int) -> int:
        return sum(held == engine for held, _ in self.held.values())

    def most(self, engine: int) -> int:
        slots = self.slots.slots(engine)
        return slots + self.queue_size if slots else 0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)),
        st.tuples(st.just("back"), st.integers(0, 99)),
        st.tuples(st.sampled_from(["offer", "withdraw"]), st.integers(0, 2)),
    ),
    min_size=20,
    max_size=60,
)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), EVENTS)
def test_the_chosen_engine_equals_an_exhaustive_search(num_engines, num_slots, queue_size, events):
    """Fails when a withdrawn engine is chosen, an engine that is offered again stays unknown, a
    sample that comes back leaves its old load, or a queue is preferred to a free slot.
    """
    slots = Slots(num_engines=num_engines, num_slots=num_slots, queue_size=queue_size)
    plain = PlainSlots(slots, num_engines=num_engines, queue_size=queue_size)
    for kind, *what in events:
        if kind == "come":
            prompt_id, index, cost = what
            sample_id = SampleId(prompt_id, index)
            if sample_id in plain.held:
                continue
            last, siblings = plain.last.get(sample_id), plain.siblings.get(prompt_id)
            engine = slots.choose(last_engine=last, siblings=siblings)
            assert engine == plain.choose(sample_id)
            assert (slots.room > 0) == (engine is not None)
            if engine is not None:
                slots.add(engine, tokens=float(cost))
                plain.held[sample_id] = engine, float(cost)
                plain.last[sample_id] = plain.siblings[prompt_id] = engine
        elif kind == "back" and plain.held:
            sample_id = sorted(plain.held)[what[0] % len(plain.held)]
            engine, tokens = plain.held.pop(sample_id)
            slots.remove(engine, tokens=tokens)
        elif kind == "offer" and what[0] < num_engines:
            slots.offer(what[0])
            plain.offered.add(what[0])
        elif kind == "withdraw" and what[0] < num_engines:
            slots.withdraw(what[0])
            plain.offered.discard(what[0])


@pytest.mark.parametrize("reject_every", [0, 3])
def test_the_counts_of_versions_match_the_groups(reject_every):
    """Fails when a group still counts after it becomes ready or is rejected, trained or restored,
    when one does not move at its first token, or when past versions are kept.
    """
    setup = Setup(alpha=2.5, length_of=lognormal(30, 0.9), budget=200, reject_every=reject_every)
    run = Run(setup)
    seen = set()
    for _ in range(12):
        run.step()
        if run.version == 6:
            run = _restore(run)
        buffer = run.buffer
        oldest = [_oldest_version(group) for group in buffer.open_groups()]
        expected = Counter(run.version if version is None else version for version in oldest)
        assert +buffer.open_versions(policy_version=run.version) == expected
        assert +buffer.ready_versions() == Counter(
            scored.group.oldest_version for scored in buffer.ready_groups()
        )
        assert len(buffer.open_versions(policy_version=run.version)) <= setup.max_staleness + 2
        assert len(buffer.ready_versions()) <= setup.max_staleness + 1
        seen |= expected.keys()
    assert len(seen) > 5


def _oldest_version(group: OpenGroup) -> int | None:
    return Group(prompt=group.prompt, samples=tuple(group.samples)).oldest_version


def _restore(run: Run) -> Run:
    again = Run(run.setup, prompts=run.prompts)
    again.collector.restore(run.collector.save())
    again.version = run.version
    return again


def test_garbage_collection_is_on_again_after_a_step_even_a_failed_one():
    """Fails when a step leaves it off, or turns it on after the user has turned it off."""
    run = Run(Setup(length_of=constant(5)))
    inside = []
    run.fakes.each[0].on_step = lambda *_: inside.append(gc.isenabled())
    assert gc.isenabled()
    run.step()
    assert gc.isenabled()
    assert inside
    assert not any(inside)
    with pytest.raises(ValueError, match="as planned"), garbage_collection_paused():
        raise ValueError("as planned")
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.usefixtures("_imports_may_be_searched")
def test_garbage_of_a_rollout_is_not_collected_at_once():
    """Fails when the first object made after a step makes Python search all objects of the step,
    or no search finds them any more. To list the oldest generation would take seconds: it has
    torch's objects too.
    """
    assert gc.isenabled()
    gc.collect()  # so that the next collection only searches the youngest objects
    with garbage_collection_paused():
        made = [[number] for number in range(2000)]
    young = {id(each) for age in (0, 1) for each in gc.get_objects(generation=age)}
    assert young.isdisjoint(map(id, made))
    assert all(map(gc.is_tracked, made))
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_imports_may_be_searched")
def test_what_an_import_made_is_left_out_of_searches():
    with imports_frozen():
        made = [[number] for number in range(2000)]
    assert not {id(each) for each in gc.get_objects()}.intersection(map(id, made))
    assert gc.isenabled()


FREES_AT_ITS_END = """
from april_rl.training.rollout.garbage_collection import imports_frozen

class Loop:
    def __init__(self):
        self.own = self
    def __del__(self):
        print("freed")

with imports_frozen():
    Loop()
print("end")
"""


def test_what_an_import_made_is_freed_at_the_end_of_the_process():
    """Fails when nanobind lists the functions of triton below the message of a failed start."""
    command = [sys.executable, "-c", FREES_AT_ITS_END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "end\nfreed\n"
