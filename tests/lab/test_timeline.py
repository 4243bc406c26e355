"""The timeline of a step, from the collector's own launches and ticks: which sample ran where and
when.
"""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from light_samples import PROMPT, completion
from report_page import Page
from report_runs import make_run
from rollout_runs import Run, Setup

from april_rl.lab.report.report import write_report
from april_rl.lab.report.timeline_chart import act_rows
from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.run.tracking.samples_file import records_of, write_samples, write_timeline
from april_rl.training.rollout.collector import Collection
from april_rl.training.rollout.measures.rollout_metrics import rollout_metrics
from april_rl.training.rollout.measures.timeline import (
    Stay,
    Timeline,
    read_timeline,
    timeline_of,
)
from april_rl.training.rollout.record import Act, StepRecord
from april_rl.types import Group, Sample, ScoredGroup

STEPS, GROUPS, SIZE, ENGINES = 3, 4, 4, 2


def run(factor: float = 2.0) -> list[tuple[Collection, Timeline]]:
    cost = EngineCost(step_s=0.01, sample_s=0.001, context_token_s=0.0, prefill_token_s=0.0)
    scenario = Scenario(
        cost=cost,
        length_of=Lognormal(median_tokens=40, sigma=0.8, seed=1),
        num_groups=GROUPS,
        group_size=SIZE,
        max_response_tokens=400,
        num_engines=ENGINES,
        tick_steps=4,
    )
    seen: list[tuple[Collection, Timeline]] = []
    simulate(
        scenario,
        over_sampling_factor=factor,
        refill=factor > 1,
        num_steps=STEPS,
        warmup_steps=0,
        on_step=lambda _, collection: seen.append((collection, timeline_of(collection.record))),
    )
    return seen


STEPS_SEEN = run()


@pytest.mark.parametrize("number", range(STEPS))
def test_every_generated_token_and_finished_sample_is_in_the_timeline(number: int) -> None:
    """Fails when a launch, a tick or the abort is forgotten."""
    collection, timeline = STEPS_SEEN[number]
    record = collection.record
    assert sum(stay.tokens for stay in timeline.stays) == record.generated_tokens > 0
    assert sum(stay.outcome == "finished" for stay in timeline.stays) == record.finished_samples > 0
    read = rollout_metrics(record, num_needed=GROUPS * SIZE).read()
    assert sum(stay.is_resumed for stay in timeline.stays) == read["rollout/resumed_samples"]
    assert timeline.time_s == record.time_s
    assert sum(timeline.slots.values()) == record.num_slots


def test_parked_samples_continue_where_they_stopped_with_their_age() -> None:
    """Fails when ages come from the wrong completion, or a parked sample looks finished."""
    before = {(s.prompt_id, s.sample): s for s in STEPS_SEEN[0][1].stays}
    resumed = [s for s in STEPS_SEEN[1][1].stays if s.is_resumed]
    assert resumed
    for stay in resumed:
        earlier = before[stay.prompt_id, stay.sample]
        assert earlier.outcome == "parked"
        assert (stay.start, stay.age, earlier.age) == (earlier.start + earlier.tokens, 1, 0)
    assert max(stay.age for stay in STEPS_SEEN[2][1].stays) == 2


@pytest.mark.parametrize("number", range(STEPS))
def test_bars_of_a_slot_do_not_overlap_and_lie_within_the_rollout(number: int) -> None:
    """Fails when a queued request is drawn as running, or engines share slots."""
    timeline = STEPS_SEEN[number][1]
    slots: dict[int, list[tuple[float, float]]] = {}
    engines: dict[int, set[int]] = {}
    for bar in timeline.bars():
        slots.setdefault(bar.slot, []).append((bar.begun_s, bar.stay.ended_s))
        engines.setdefault(bar.slot, set()).add(bar.stay.engine)
    assert all(len(found) == 1 for found in engines.values())
    assert 0.7 * 2 * GROUPS * SIZE <= len(slots) <= 2 * GROUPS * SIZE
    for bars in slots.values():
        assert all(0 <= begun <= ended <= timeline.time_s for begun, ended in bars)
        assert all(first[1] <= second[0] for first, second in pairwise(bars))


def test_each_turn_of_a_sample_is_drawn_separately() -> None:
    """Fails when all turns end with the last one, observations count as generated, or a turn after
    one counts as resumed.
    """
    run, tokens = Run(Setup(turns=4, alpha=2.0, num_engines=2)), Counter[tuple[int, int]]()
    for _ in range(4):
        record = run.step().record
        stays, resumed = timeline_of(record).stays, 0
        for stay in sorted(stays, key=lambda stay: stay.sent_s):
            assert stay.sent_s <= stay.ended_s
            assert stay.start == tokens[stay[:2]]
            tokens[stay[:2]] += stay.tokens
            resumed += stay.is_resumed
        assert resumed == sum(each.is_resumed for each in record.returned)
    assert len(stays) > len({stay[:2] for stay in stays}), (
        "some samples have several turns in a step"
    )
    assert resumed > 0


def test_an_acting_sample_has_no_slot_and_another_one_takes_it(tmp_path: Path) -> None:
    """Fails when a wait for an environment is lost at either end of a step, or overlaps a turn."""
    run, at_ends = Run(Setup(turns=4, alpha=2.0, delay=3)), Counter[bool]()
    num_taken = num_submitted = 0
    for _ in range(4):
        timeline = timeline_of(run.step().record)
        lives = defaultdict[tuple[int, int], list[tuple[float, float, str]]](list)
        for stay in timeline.stays:
            lives[stay[:2]].append((stay.sent_s, stay.ended_s, stay.outcome))
        for act in timeline.acts:
            lives[act[:2]].append((act.begun_s, act.ended_s, "answer"))
            at_ends[act.ended_s == timeline.time_s] += 1
        for life in map(sorted, lives.values()):
            for before, after in pairwise(life):
                assert before[1] <= after[0]
                assert (before[2] == "acting") == (before[1] == after[0] and after[2] == "answer")
            assert life[-1][2] != "acting"
        bars = sorted(timeline.bars(), key=lambda bar: (bar.slot, bar.begun_s))
        num_taken += sum(
            before.slot == after.slot and before.stay[:2] != after.stay[:2]
            for before, after in pairwise(bars)
            if before.stay.outcome == "acting"
        )
        finished = sum(stay.outcome == "finished" for stay in timeline.stays)
        finished += sum(act.is_finished for act in timeline.acts)
        assert finished == len(run.scorer.submitted) - num_submitted
        num_submitted = len(run.scorer.submitted)
    assert num_taken > 0
    assert all(at_ends[at_end] for at_end in (False, True))
    read = read_timeline(write_timeline(tmp_path, 4, timeline.plain())).acts
    assert [act[:2] for act in read] == [act[:2] for act in timeline.acts]
    assert [act.ended_s for act in read] == pytest.approx(
        [a.ended_s for a in timeline.acts], abs=1e-4
    )


def test_the_report_draws_acting_samples_above_the_slots(tmp_path: Path) -> None:
    """The trace shows them as a process. Fails when a turn looks finished, or responses look as if
    they spanned several steps because they have several turns.
    """
    run_dir, run = make_run(tmp_path / "run"), Run(Setup(turns=4, alpha=2.0, delay=3))
    collection = [run.step() for _ in range(3)][-1]
    timeline = timeline_of(collection.record)
    write_timeline(run_dir / "timeline", 6, timeline.plain())
    ones = [[1.0] * run.setup.group_size] * len(collection.groups)
    records = records_of(collection.groups, ones, decode=lambda _: "", policy_version=2)
    write_samples(run_dir / "samples", 6, records)

    page = Page(write_report(run_dir).path.read_text())
    bars, marks, acts = (
        each.get("data", page.specs["timeline"]["data"])["values"]
        for each in page.specs["timeline"]["layer"]
    )
    assert "acting" in {mark["state"] for mark in marks}
    assert len(acts) == len(timeline.acts) > 0
    assert min(act["row"] for act in acts) > max(bar["below"] for bar in bars)
    assert f"hold no slot: {len(timeline.acts)} times" in page.text
    lengths = page.specs["length-histogram"]["data"]["values"]
    is_parked = [len({age for age, _ in record.ages}) > 1 for record in records]
    assert [each["pieces"] == "over several steps" for each in lengths] == is_parked
    assert any(len(r.ages) > 1 for r, parked in zip(records, is_parked, strict=True) if not parked)

    trace = json.loads((run_dir / "timeline" / "step_00006.trace.json").read_text())["traceEvents"]
    (environments,) = [e["pid"] for e in trace if e.get("args") == {"name": "environments"}]
    found = [e for e in trace if e["pid"] == environments and e["ph"] == "X"]
    assert [e["ts"] for e in found] == [round(1e6 * round(a.begun_s, 4)) for a in timeline.acts]


def test_the_rows_of_acting_samples_are_as_few_as_act_at_once() -> None:
    begun_ended = [(0, 5), (0, 2), (1, 3), (2, 4), (3, 6), (5, 7)]
    acts = tuple(Act(n, 0, *times, False) for n, times in enumerate(begun_ended))
    assert [row for _, row in act_rows(acts)] == [0, 1, 2, 1, 2, 1]


def test_a_timeline_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    timeline = STEPS_SEEN[1][1]
    path = write_timeline(tmp_path / "timeline", 2, timeline.plain())
    assert path.name == "step_00002.json"
    assert json.loads(path.read_text())["columns"] == list(Stay._fields)
    found = read_timeline(path)
    assert found.slots == timeline.slots
    assert [tick[:-1] for tick in found.ticks] == [tick[:-1] for tick in timeline.ticks]
    assert [t.elapsed_s for t in found.ticks] == pytest.approx(
        [t.elapsed_s for t in timeline.ticks]
    )
    assert [s._replace(sent_s=0, ended_s=0) for s in found.stays] == [
        s._replace(sent_s=0, ended_s=0) for s in timeline.stays
    ]
    assert [s.ended_s for s in found.stays] == pytest.approx(
        [s.ended_s for s in timeline.stays], abs=1e-4
    )


@pytest.mark.parametrize(("num_ticks", "expected"), [(0, 0), (9, 9), (600, 200)])
def test_a_timeline_has_at_most_256_ticks_evenly_spread(num_ticks: int, expected: int) -> None:
    """Ticks that computed nothing are left out. Fails when only the first ones are kept."""
    record = StepRecord(policy_version=0, num_slots=1, clock=lambda: 0.0)
    idle = replace(STEPS_SEEN[0][0].record.ticks[0][1], engine_steps=0)
    for number in range(num_ticks):
        record.ticks += [(0, replace(idle, engine_steps=1, elapsed_s=float(number))), (0, idle)]
    ticks = timeline_of(record).ticks
    step = 3 if num_ticks > 256 else 1
    assert [tick.elapsed_s for tick in ticks] == list(range(0, num_ticks, step))
    assert len(ticks) == expected


def test_a_broken_timeline_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_00001.json"
    path.write_text('{"step": 1}')
    with pytest.raises(ValueError, match=r"step_00001.json is not the timeline of a step"):
        read_timeline(path)


def test_a_saved_response_marks_where_each_of_its_completions_ends() -> None:
    """Fails when the boundaries of parked samples are lost, or counted in tokens."""
    parts = (
        completion(0, start=0, num_tokens=2, version=3),
        completion(0, start=2, num_tokens=1, version=4),
    )
    last = replace(parts[1], finish_reason="stop")
    samples = (
        Sample(PROMPT, 0, (parts[0], last)),
        Sample(PROMPT, 1, (replace(parts[0], finish_reason="stop"),)),
    )
    group = ScoredGroup(group=Group(prompt=PROMPT, samples=samples), rewards=(1.0, 0.0))
    records = records_of(
        [group], [[0.0, 0.0]], decode=lambda ids: "abc" * len(ids), policy_version=4
    )
    assert [record.ends for record in records] == [(6, 9), ()]
    assert records[0].ages == ((1, 2), (0, 1))
