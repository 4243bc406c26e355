"""The collector when engines hang or reply late, and when rewards fail, hang or are all equal."""

from dataclasses import replace

import pytest
from fake_engine import FakeEngines
from rollout_runs import Run, Setup, check_drained, check_sample, constant, lognormal

from april_rl.errors import EngineStalledError, RunError
from april_rl.training.rollout.buffer import LedgerError
from april_rl.training.rollout.record import GroupState
from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Completion, Sample, Score


class FaultyEngines(FakeEngines):
    """Engines of which engine 0 hangs on request; its samples then come late, never, or
    are lost.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.length_of, num_engines=setup.num_engines, budget=setup.budget)
        self.is_stuck = False
        self.loses_samples = False
        self.reports_twice = False  # whether it first reports like an older version
        self.submitted: list[Requests] = []  # requests that were submitted while the engine hung
        self.late: list[tuple[int, Tick]] = []
        self.timeouts_s: list[float] = []

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        if engine == 0 and self.is_stuck:
            self.submitted.append(submit)
            return
        super().launch(engine, submit, slots=slots, max_steps=max_steps)

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        if not any(self.under_way):
            raise EngineStalledError("engine 0 has not answered")
        late, self.late = self.late, []
        return late + super().wait(timeout_s, gather_s=gather_s)

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        self.timeouts_s.append(timeout_s)
        completions, _ = super().abort(timeout_s)
        if self.reports_twice:
            late = [replace(each, policy_version=each.policy_version - 1) for each in completions]
            return [*late, *completions], []
        if not self.is_stuck or not self.submitted:
            return (completions[1:] if self.loses_samples else completions), []
        return completions, [0]

    def recover(self) -> None:
        """Let engine 0 reply again, starting with the results that were no longer expected."""
        requests = [request for submit in self.submitted for request in submit.each()]
        self.submitted, self.is_stuck = [], False
        if requests:
            tick = self.each[0].advance(requests, slots=len(requests), max_steps=10**6)
            self.late = [(0, tick)]


def faulty(*, num_engines: int = 2, **changes: object) -> tuple[Run, FaultyEngines]:
    setup = Setup(num_engines=num_engines, alpha=2.0, **changes)  # type: ignore[arg-type]
    engines = FaultyEngines(setup)
    run = Run(setup, engines)
    run.fakes = engines
    return run, engines


def assert_parked_and_accounted_for(run: Run, *, dropped: int = 0) -> None:
    assert run.buffer.counts()[GroupState.in_flight] == 0
    run.buffer.check()
    assert run.num_dropped() == dropped
    for sample in run.alive:
        check_sample(sample)


@pytest.mark.parametrize("finish_stale", [True, False])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_hung_engine_ends_the_step_with_everything_parked(num_engines, finish_stale):
    """Invariant 6. Fails when the step does not abort after an error of `wait` (in flight is not
    0), when the abort's error hides that error, or when the other engine's completions of the abort
    are dropped.
    """
    run, engines = faulty(num_engines=num_engines, finish_stale=finish_stale)
    run.step()
    engines.is_stuck = True
    noticed = {1: "engine 0 has not answered", 2: "did not return its samples within 7 s"}
    with pytest.raises(EngineStalledError, match=noticed[num_engines]):
        run.steps(10)
    assert set(engines.timeouts_s) == {7.0}
    assert_parked_and_accounted_for(run)
    assert engines.generated == run.num_tokens_held()


def test_after_a_stalled_engine_is_replaced_its_samples_continue():
    """Fails when a stalled engine's samples stay in its slots, or restart from their prompt."""
    run, engines = faulty()
    run.steps(2)
    engines.is_stuck = True
    with pytest.raises(EngineStalledError):
        run.steps(10)
    engines.submitted, engines.is_stuck = [], False
    run.steps(3)
    run.drain()
    check_drained(run)


def test_completions_of_a_stalled_engine_are_ignored_one_step_later():
    """Fails when completions are matched by engine only: the sample would get its tokens twice,
    first from the older version.
    """
    run, engines = faulty(length_of=constant(12), tick_steps=3)
    run.step()
    engines.is_stuck = True
    with pytest.raises(EngineStalledError):
        run.steps(10)
    for engine in engines.each:
        engine.policy_version = 0
    engines.recover()
    late = {completion.sample_id for completion in engines.late[0][1].finished}
    resumed_by = run.version = run.version + 1
    run.steps(4)
    assert not engines.late
    trained = [sample for scored in run.trained for sample in scored.group.samples]
    assert late & {sample.id for sample in trained}
    for sample in trained:
        check_sample(sample)
        if sample.id in late:
            assert sample.policy_versions[-1] >= resumed_by
    assert_parked_and_accounted_for(run)


def test_a_late_completion_is_not_mistaken_for_the_one_from_the_abort():
    """Fails when the first completion of a sample is accepted as the one from the abort."""
    run, engines = faulty(length_of=lognormal(20, 0.9))
    engines.reports_twice = True
    for _ in range(4):
        assert run.step().record.returned
        assert run.num_tokens_held() == engines.generated
    assert any(sample.num_tokens and not sample.is_finished for sample in run.alive)


def test_a_sample_that_an_engine_loses_ends_the_run_with_an_error_that_names_it():
    run, engines = faulty()
    engines.loses_samples = True
    with pytest.raises(LedgerError, match="did not return samples"):
        run.step()


@pytest.mark.parametrize("refill", [True, False])
def test_a_group_whose_reward_fails_is_dropped_and_its_slots_are_refilled(refill):
    """Fails when a failed score counts as a value, one-shot does not free the slots, or nothing is
    said.
    """
    run = Run(Setup(alpha=1.0, refill=refill, failing=frozenset({0, 2, 3}), delay=3))
    notes = run.step().notes
    assert any("dropped because a reward, environment or engine failed" in note for note in notes)
    trained = {scored.group.prompt.id for scored in run.trained}
    assert len(trained) == 3
    assert not trained & {0, 2, 3}
    assert run.buffer.counts()[GroupState.dropped] == run.num_dropped() == 3
    assert run.buffer.drop_reasons == {"reward crash": 3}


def test_a_hung_reward_blocks_neither_generation_nor_the_abort():
    """Invariant 6. Fails when a step waits for every score."""
    run = Run(Setup(stuck=frozenset({0, 1}), max_staleness=50))
    run.steps(6)
    assert len(run.trained) == 18
    assert {scored.group.prompt.id for scored in run.trained}.isdisjoint({0, 1})
    assert [group.prompt.id for group in run.buffer.open_groups()][:2] == [0, 1]
    assert run.scorer.num_waits == 0


def test_a_slow_reward_limits_how_many_prompts_are_opened():
    """Fails when groups that wait for scores do not count as live."""
    setup = Setup(delay=500, max_staleness=2, length_of=constant(1))
    run = Run(setup)
    for _ in range(5):
        run.step()
        assert len(run.alive) <= setup.group_size * setup.num_groups * (setup.max_staleness + 1)


@pytest.mark.parametrize("refill", [True, False])
def test_a_step_with_only_rejected_groups_fails_and_names_the_setting(refill):
    run = Run(Setup(reject_every=1, refill=refill, max_rejected_groups=7))
    with pytest.raises(RunError, match="nothing can be learned from it"):
        run.step()
    assert len(run.rejected) >= 7
    assert_parked_and_accounted_for(run)


def test_messages_about_rejected_groups_name_the_users_filter():
    """At the limit, a step returns the groups that are ready. Fails when messages mention equal
    rewards, which the user's filter may ignore.
    """
    setup = Setup(reject_every=1, max_rejected_groups=7, cause="by mine:keep")
    with pytest.raises(RunError, match=r"rejected by mine:keep"):
        Run(setup).step()
    few = replace(setup, num_groups=4, reject_every=2, max_rejected_groups=3, refill=False, alpha=1)
    collection = Run(few).step()
    assert 0 < len(collection.groups) < 4
    assert any("rejected by mine:keep" in note for note in collection.notes)


def test_one_shot_starts_another_group_after_a_rejected_one():
    run = Run(Setup(reject_every=2, refill=False, alpha=1.0, length_of=lognormal(5, 1.0)))
    groups = run.step().groups
    assert [scored.group.prompt.id for scored in groups] == [1, 3, 5]
    assert run.prompts.taken == [0, 1, 2, 3, 4, 5]


def test_a_rejected_groups_slots_are_refilled_while_the_others_still_run():
    setup = Setup(
        reject_every=4, refill=False, alpha=1.0, length_of=lambda s: 1 if s.prompt_id == 0 else 40
    )
    record = Run(setup).step().record
    assert sum(tick.engine_steps for _, tick in record.ticks) < 60


def test_rewards_that_always_fail_end_in_an_error_that_gives_the_reason():
    setup = Setup(failing=frozenset(range(1000)), max_rejected_groups=7)
    run = Run(setup)
    with pytest.raises(RunError, match=r"7 groups were dropped.*The last failure: sample 0"):
        run.step()
    assert_parked_and_accounted_for(run, dropped=7)


@pytest.mark.parametrize("error", [RunError("the reward is broken"), KeyboardInterrupt()])
def test_samples_in_flight_are_parked_however_the_step_ends(error):
    """Fails when a step ends by an error of the scorer, or by Ctrl-C, without aborting the
    requests.
    """
    run = Run(Setup(length_of=lognormal(20, 0.5), delay=1))
    run.step()
    known = run.scorer.collect

    def collect(timeout_s: float | None) -> list[Score]:
        if run.fakes.generated > before + 30:
            raise error
        return known(timeout_s)

    before = run.fakes.generated
    run.scorer.collect = collect  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        run.steps(5)
    assert run.fakes.generated == run.num_tokens_held()
    assert_parked_and_accounted_for(run)


def test_completions_are_kept_when_the_scorer_raises():
    """Fails when an error of the scorer loses the other completions of a tick or of the abort, or
    gets lost itself.
    """
    run = Run(
        Setup(length_of=lambda s: 3 if s.prompt_id == 0 else 30, group_size=4, computes_on=False)
    )

    def submit(_: Sample, *, group_size: int) -> None:  # noqa: ARG001
        raise RunError("the reward is broken")

    run.scorer.submit = submit  # type: ignore[method-assign]
    with pytest.raises(RunError, match="the reward is broken"):
        run.step()
    assert run.fakes.generated == run.num_tokens_held() > 0
    assert_parked_and_accounted_for(run)


def test_a_step_cut_short_by_lost_groups_still_waits_for_groups_that_are_due():
    """With cap 0 no group may stay open. Fails when the step's own version is not checked."""
    setup = Setup(
        num_groups=4,
        alpha=1.0,
        refill=False,
        max_staleness=0,
        reject_every=2,
        max_rejected_groups=2,
        length_of=lambda s: 30 if s.prompt_id == 1 else 3,
    )
    run = Run(setup)
    groups = run.step().groups
    assert [scored.group.prompt.id for scored in groups] == [1, 3]
    assert run.alive == []
