"""A run that is saved, killed and restored loses, repeats and changes nothing."""

import json
import math
from array import array
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngines
from fake_outside import FakePrompts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_runs import (
    SETUPS,
    Run,
    Setup,
    check_counts,
    check_drained,
    check_sample,
    check_trainable,
    lognormal,
)

from april_rl.errors import RunError
from april_rl.task.data.stream import PromptStream
from april_rl.training.rollout.requests import Request
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Completion, Prompt, SampleId

PROMPTS = [  # a run reads these several times
    Prompt(id=i, token_ids=(i + 1,) * (1 + i % 3), text=f"{i}?", answer=f"{i}", source=f"{i}")
    for i in range(7)
]
LONG = Setup(num_groups=3, group_size=3, alpha=2.5, num_engines=2, length_of=lognormal(12, 0.8))


class KilledError(Exception):
    """Stands for the end of the process."""


class Stream(FakePrompts):
    """The real stream, with a record of the prompts taken."""

    def __init__(self, *, turns: int) -> None:
        super().__init__(turns=turns)
        self.real = PromptStream(PROMPTS, seed=3)

    def take(self) -> Prompt:
        prompt = self.real.take()
        prompt = replace(prompt, has_environment=self.turns > 0 and prompt.id % 2 == 0)
        self.taken.append(prompt.id)
        return prompt


class MortalEngines(FakeEngines):
    """Engines that raise KilledError at the n-th call from now."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(
            setup.length_of,
            num_engines=setup.num_engines,
            budget=setup.budget,
            keeps=setup.keeps,
            computes_on=setup.computes_on,
        )
        self.calls_left = math.inf

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        self._live()
        return super().wait(timeout_s, gather_s=gather_s)

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        self._live()
        return super().abort(timeout_s)

    def _live(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise KilledError


def start(setup: Setup) -> Run:
    engines = MortalEngines(setup)
    run = Run(setup, engines, prompts=Stream(turns=setup.turns))
    run.fakes = engines
    return run


def save(run: Run) -> str:
    """Return the whole state of a run as text, with the test's own records."""
    assert isinstance(run.prompts, Stream)
    return json.dumps(
        {
            "collector": run.collector.save(),
            "stream": run.prompts.real.save(),
            "version": run.version,
            "taken": run.prompts.taken,
        },
        allow_nan=False,
        default=lambda numbers: {"array": numbers.typecode, "of": numbers.tolist()},
    )


def load(saved: str) -> dict[str, Any]:
    return json.loads(
        saved, object_hook=lambda of: array(of["array"], of["of"]) if "array" in of else of
    )


def restore(saved: str, before: Run, *, trained: int, rejected: int) -> Run:
    """Return a new run that continues from `saved`, with the records of that time."""
    state = load(saved)
    run = start(before.setup)
    assert isinstance(run.prompts, Stream)
    run.prompts.real.restore(state["stream"])
    run.prompts.taken = state["taken"]
    run.collector.restore(state["collector"])
    run.version = state["version"]
    run.trained, run.rejected = before.trained[:trained], before.rejected[:rejected]
    return run


def revive(run: Run) -> Run:
    return restore(save(run), run, trained=len(run.trained), rejected=len(run.rejected))


def check_books(run: Run) -> None:
    """Compare the ledger with the test's own records of every prompt."""
    check_counts(run)
    assert len(run.prompts.taken) == len(set(run.prompts.taken))
    ends = Counter(scored.group.prompt.id for scored in run.trained + run.rejected)
    assert set(ends.values()) <= {1}
    assert not ends.keys() & {sample.prompt.id for sample in run.alive}
    for sample in run.alive:
        check_sample(sample)


quick = settings(max_examples=60, deadline=None)


@quick
@given(SETUPS, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=4))
@example(LONG, [(3, 2), (0, 4), (1, 0)])
def test_a_run_killed_at_any_point_resumes_from_its_last_save_with_nothing_lost(setup, lives):
    """Invariant 3, through save, kill and restore: each life takes some steps, saves, and is killed
    at some call of the engines in the next step or after it. Fails when the saved state lacks the
    parked groups, the ready groups or the final counts, when finished samples without a score are
    not submitted for scoring again, or when the sum is not restored.
    """
    run = start(setup)
    for steps, calls in lives:
        run.steps(steps)
        saved, trained, rejected = save(run), len(run.trained), len(run.rejected)
        run.fakes.calls_left = calls
        with suppress(KilledError):
            run.step()
        run = restore(saved, run, trained=trained, rejected=rejected)
        check_books(run)
    run.steps(2)
    check_books(run)
    run.drain()
    check_books(run)
    assert run.alive == []
    for scored in run.trained:
        check_trainable(scored, setup)
        for sample in scored.group.samples:
            check_sample(sample)


@quick
@given(SETUPS, st.integers(1, 5))
@example(LONG, 8)
@example(replace(LONG, num_engines=3, delay=3), 8)
def test_a_run_restored_before_every_step_equals_the_uninterrupted_one(setup, steps):
    """It has the same groups, and the same requests with the same seeds to the same engines in the
    same order; rewards see the same samples in the same order. Fails when versions, the parts of a
    sample, scores so far, a group's age, the expected length or a sample's engine are not restored,
    or when samples that finished at the abort are scored in the order in which they finished.
    """
    setup = replace(setup, keeps=False, deterministic=True)  # a new engine has kept nothing
    whole, run = start(setup), start(setup)
    asked: list[list[Request]] = [[] for _ in range(setup.num_engines)]
    scored: list[SampleId] = []
    for _ in range(steps):
        uninterrupted = whole.step()
        run = revive(run)
        again = run.step()
        for requests, engine in zip(asked, run.fakes.each, strict=True):
            requests += engine.requests
        scored += run.scorer.collected
        assert run.trained == whole.trained
        assert run.alive == whole.alive
        assert again.metrics == uninterrupted.metrics
        assert run.buffer.drop_reasons == whole.buffer.drop_reasons
    assert asked == [engine.requests for engine in whole.fakes.each]
    assert run.prompts.taken == whole.prompts.taken
    assert scored == whole.scorer.collected


def test_a_saved_state_is_json_and_is_the_same_when_saved_after_a_restore():
    """Fails when a field is saved and not restored, a failed score is written as NaN, or samples
    that have their score are scored again.
    """
    run = start(replace(LONG, failing=frozenset(range(20)), delay=5, length_of=lognormal(4, 1.2)))
    outcomes = set()
    for _ in range(6):
        run.step()
        saved = save(run)
        groups = load(saved)["collector"]["buffer"]["open"]
        outcomes |= {score["outcome"] for group in groups for score in group["scores"]}
        again = restore(saved, run, trained=len(run.trained), rejected=len(run.rejected))
        assert save(again) == saved
        known = {(g["prompt"]["id"], score["index"]) for g in groups for score in g["scores"]}
        finished = {sample.id for sample in run.alive if sample.is_finished}
        waiting = {id_ for id_ in finished if (id_.prompt_id, id_.index) not in known}
        ready = {scored.group.prompt.id for scored in run.buffer.ready_groups()}
        assert set(again.scorer.submitted) == {id_ for id_ in waiting if id_.prompt_id not in ready}
    assert outcomes == {"scored", "crash"}


def test_groups_rejected_while_scores_are_settled_count_in_the_next_step():
    """Fails when only groups that the step itself rejects count, or a restored run forgets the
    others.
    """
    setup = Setup(num_groups=2, alpha=3.0, reject_every=2, delay=6, length_of=lognormal(6, 1.0))
    run, between = start(setup), 0
    counted: list[int] = []
    for _ in range(6):
        counted.append(run.step().record.groups.lost.rejected)
        before = len(run.rejected)
        run.collector.settle_scores()
        between += len(run.rejected) - before
        run = revive(run)
        assert run.buffer.events.lost.rejected == len(run.rejected) - before
    assert between > 0
    counted.append(run.step().record.groups.lost.rejected)
    assert sum(counted) == len(run.rejected)


def test_a_state_of_another_format_is_refused_by_name():
    run = start(LONG)
    with pytest.raises(RunError, match=r"has format 1, .* reads format 8"):
        run.collector.restore({**run.collector.save(), "format": 1})
    with pytest.raises(RunError, match="has format None"):
        run.collector.restore({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 2}, r"rollout\.group_size=2.*have 3 samples"),
        ({"budget": 3}, r"rollout\.max_response_tokens=3"),
    ],
)
def test_settings_that_a_saved_run_cannot_resume_with_are_refused(changes, message):
    """Fails when the run continues with a sample beyond its budget, or with a group of another
    size.
    """
    run = start(replace(LONG, length_of=lambda _: 40, tick_steps=5, alpha=1.5))
    run.step()
    state = run.collector.save()
    with pytest.raises(RunError, match=message):
        start(replace(run.setup, **changes)).collector.restore(state)


def test_a_run_resumes_with_fewer_engines_than_it_was_saved_with():
    """Fails when a sample is sent to its former engine, which does not exist any more."""
    run = start(replace(LONG, num_engines=3))
    run.steps(3)
    saved = save(run)
    homes = [group["homes"] for group in load(saved)["collector"]["buffer"]["open"]]
    assert {home for of_group in homes for home in of_group} >= {0, 1, 2}
    run.setup = replace(run.setup, num_engines=1)
    again = restore(saved, run, trained=len(run.trained), rejected=len(run.rejected))
    again.steps(3)
    again.drain()
    check_drained(again)


def test_a_saved_state_does_not_change_while_the_run_continues():
    """Fails when the saved state shares a list with the run."""
    run = start(replace(LONG, num_engines=3))
    run.steps(3)
    state = run.collector.save()
    saved = deepcopy(state)
    run.steps(2)
    assert state == saved


def test_a_state_cannot_be_saved_in_the_middle_of_a_step():
    """Fails when groups in flight are saved as if they were parked."""
    run = start(LONG)
    run.fakes.calls_left = 2
    with pytest.raises(KilledError):
        run.step()
    with pytest.raises(AssertionError, match="between steps"):
        run.collector.save()
