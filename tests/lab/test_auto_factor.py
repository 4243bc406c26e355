"""`rollout.over_sampling_factor=auto` decides from predictions and saves its state."""

import json
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from rollout_runs import Run, Setup
from tuned_runs import (
    NARROW,
    SET_UPS,
    UNLIMITED,
    at_once,
    one_length,
    prediction,
    scenario,
    tune,
    tuner,
)

from april_rl.lab.simulator.prediction import Prediction
from april_rl.lab.simulator.simulation import Scenario
from april_rl.lab.tuning.auto_factor import AutoFactor, Budgets
from april_rl.lab.tuning.comparison import Comparison
from april_rl.training.rollout.over_sampling import FixedFactor, largest_factor
from april_rl.training.rollout.record import StepRecord

SMALL = scenario(num_groups=2, group_size=2, max_response_tokens=200)


# Single decisions on given predictions.


def script(
    gain: Callable[[float], float] = lambda _: 1.0, *, asked: list[Comparison] | None = None
) -> Callable[[Comparison], Future[list[Prediction]]]:
    """Return predictions in which α has the throughput `gain(α)` and no budget is exceeded."""

    def submit(comparison: Comparison) -> Future[list[Prediction]]:
        if asked is not None:
            asked.append(comparison)
        predictions: Future[list[Prediction]] = Future()
        predictions.set_result(
            [prediction(mode, speed=gain(mode.factor)) for mode in comparison.modes]
        )
        return predictions

    return submit


def test_alpha_goes_up_for_a_gain_of_three_percent_and_not_of_one() -> None:
    """Fails when any predicted gain is worth a change, or none is."""
    slow = tune(SMALL, tuner(SMALL, submit=script(lambda α: α**0.02)), num_steps=60)
    fast = tune(SMALL, tuner(SMALL, submit=script(lambda α: α**0.3)), num_steps=60)
    assert slow.factors[-1] == 1.5
    assert fast.factors[-1] == 4


def test_after_going_down_alpha_only_goes_up_again_for_twice_the_gain() -> None:
    """The predictions reverse: α = 1.5 first seems to lose, then to gain 4 %. Fails when it follows
    them forever.
    """
    compared: list[float] = []

    def gain(factor: float) -> float:
        if factor == 1.5:
            compared.append(factor)
        return 1.0 if factor == 1 else (0.9 if len(compared) < 4 else 1.04)

    run = tune(SMALL, tuner(SMALL, submit=script(gain)), num_steps=200)
    assert run.factors[-1] == 1
    assert len(run.changed_at) == 2


def test_a_single_high_prediction_does_not_change_alpha() -> None:
    """Fails when each comparison takes effect directly."""
    compared: list[float] = []

    def gain(factor: float) -> float:
        compared.extend([factor] if factor == 2 else [])
        return {1: 1.0, 1.5: 1.01, 2: 1.06 if len(compared) == 4 else 1.01}[factor]

    run = tune(SMALL, tuner(SMALL, submit=script(gain)), num_steps=80)
    assert len(compared) > 5
    assert max(run.factors) == 1.5


def test_comparisons_become_rarer_while_alpha_stays() -> None:
    """Fails when comparisons are made at every step, or never again."""
    asked: list[Comparison] = []
    tune(SMALL, tuner(SMALL, submit=script(lambda α: α**0.02, asked=asked)), num_steps=100)
    assert 8 <= len(asked) <= 12


def test_a_step_does_not_wait_for_predictions() -> None:
    """The old factor stays until the prediction arrives, and no other is requested. Fails when
    begin_step waits: then this test never ends.
    """
    pending: list[tuple[Comparison, Future[list[Prediction]]]] = []

    def submit(comparison: Comparison) -> Future[list[Prediction]]:
        pending.append((comparison, Future()))
        return pending[-1][1]

    auto = tuner(SMALL, submit=submit)
    run = tune(SMALL, auto, num_steps=20)
    assert set(run.factors) == {1}
    assert len(pending) == 1
    comparison, predictions = pending[0]
    predictions.set_result(script()(comparison).result())
    assert "1 → 1.5" in (auto.begin_step() or "")
    assert auto.factor == 1.5
    assert auto.begin_step() is None


def test_a_failed_simulation_is_reported_once_and_alpha_stays() -> None:
    """Fails when it ends the run, or another simulation is requested again and again."""
    asked: list[Comparison] = []

    def submit(comparison: Comparison) -> Future[list[Prediction]]:
        asked.append(comparison)
        predictions: Future[list[Prediction]] = Future()
        predictions.set_exception(ValueError("no such engine"))
        return predictions

    run = tune(SMALL, tuner(SMALL, submit=submit), num_steps=30)
    assert set(run.factors) == {1}
    assert len(asked) == 1
    assert run.notes == [
        "rollout.over_sampling_factor=auto stays at 1: its simulation failed (ValueError: no such "
        "engine)"
    ]


def test_an_alpha_that_exceeds_a_budget_twice_in_a_row_is_never_used_again() -> None:
    """Fails when a single wrong comparison is enough, when it is tried again, or when the budget is
    only checked on the way up.
    """
    # KV tokens that each comparison predicts for α above 1.25.
    held = [50, 50, 200, 50, *[200] * 3, *[50] * 20]

    def submit(comparison: Comparison) -> Future[list[Prediction]]:
        kv_tokens = held.pop(0)
        predictions: Future[list[Prediction]] = Future()
        predictions.set_result(
            [
                prediction(
                    mode, speed=1.0 + (mode.factor > 1), kv_tokens=kv_tokens * (mode.factor > 1.25)
                )
                for mode in comparison.modes
            ]
        )
        return predictions

    auto = tuner(SMALL, Budgets(max_off_policy_frac=1.0, kv_cache_tokens=100), submit=submit)
    run = tune(SMALL, auto, num_steps=150)
    assert [run.factors[i] for i in run.changed_at] == [1.5, 1.25]
    assert run.changed_at[1] > 40
    assert "1.5 → 1.25: at 1.5 an engine holds up to 210 tokens" in run.notes[-1]


def test_alpha_never_exceeds_what_the_staleness_cap_allows() -> None:
    """Fails when the largest α does not depend on the cap."""
    of = scenario(length_of=NARROW, max_staleness=1, keeps_parked=True)
    run = tune(of, tuner(of, submit=script(lambda α: α)), num_steps=30)
    assert max(run.factors) == largest_factor(1) == 2


def test_steps_without_engine_work_do_not_count_towards_the_next_comparison() -> None:
    """Fails when such a step counts: after two steps with work, a comparison would be due."""
    asked: list[Comparison] = []
    auto = tuner(SMALL, submit=script(asked=asked))
    tune(SMALL, auto, num_steps=2)
    for version in range(2, 20):
        auto.observe(StepRecord(num_slots=4, policy_version=version, clock=lambda: 0.0))
    assert asked == []


# Save and restore.


def learn(of: Scenario, *, num_steps: int) -> tuple[AutoFactor, list[Comparison]]:
    asked: list[Comparison] = []

    def submit(comparison: Comparison) -> Future[list[Prediction]]:
        asked.append(comparison)
        return at_once(comparison)

    auto = tuner(of, SET_UPS["kv"].budgets, submit=submit)
    tune(of, auto, num_steps=num_steps)
    return auto, asked


@pytest.mark.slow
def test_what_was_learned_survives_save_and_restore() -> None:
    """Saved as JSON. Fails when anything is left out: the next comparisons and their consequences
    are the same.
    """
    of = SET_UPS["kv"].scenario
    first, first_asked = learn(of, num_steps=11)
    second, second_asked = learn(of, num_steps=0)
    second.restore(json.loads(json.dumps(first.save())))
    assert second.factor == first.factor == 1.75
    assert second.save() == json.loads(json.dumps(first.save()))
    again = [tune(of, auto, num_steps=14) for auto in (first, second)]
    assert again[0].factors == again[1].factors
    assert again[0].notes == again[1].notes
    assert second_asked
    assert first_asked[-len(second_asked) :] == second_asked


def test_the_collector_saves_and_restores_the_state_of_auto() -> None:
    """Fails when a restored run starts learning from the beginning."""
    setup = Setup(num_groups=2, group_size=2)
    factors = []
    saved = None
    for _ in range(2):
        auto = tuner(SMALL, submit=script(lambda α: α))
        run = Run(setup, over_sampling=auto)
        if saved is not None:
            run.collector.restore(saved)
        else:
            run.steps(20)
            saved = run.collector.save()
        factors.append(auto.factor)
    assert factors == [4, 4]


def test_a_resume_may_change_a_fixed_alpha_to_auto() -> None:
    """A run that learned may also get a fixed factor. Fails when either state is refused."""
    auto = tuner(SMALL, submit=script())
    auto.restore(FixedFactor(2.0).save())
    assert auto.factor == 1
    fixed = FixedFactor(2.0)
    fixed.restore(auto.save())
    assert fixed.factor == 2


def test_a_smaller_staleness_cap_limits_what_was_learned() -> None:
    """Fails when the restored α is above what the new cap allows."""
    of = scenario(length_of=one_length)
    auto = tuner(of, UNLIMITED, submit=script(lambda α: α))
    tune(of, auto, num_steps=20)
    assert auto.factor == 4
    again = tuner(scenario(max_staleness=1))
    again.restore(auto.save())
    assert again.factor == 2
