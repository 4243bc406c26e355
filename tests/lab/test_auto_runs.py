"""`rollout.over_sampling_factor=auto` finds the best α on simulated engines, and then keeps it."""

import numpy as np
import pytest
from tuned_runs import GRID, SET_UPS, noisy, of_the_best, scenario, tune, tuned_run, tuner

from april_rl.lab.tuning.auto_factor import Budgets

pytestmark = pytest.mark.slow
# One scenario in which α has to come down again, and one in which it grows up to its budget;
# test_auto_runs_soak.py tries all of them, with more seeds and steps.
NAMES = pytest.mark.parametrize("name", ["saturated", "kv"])


# Whole searches with 20 % noise on every tick.


@NAMES
def test_auto_ends_within_five_percent_of_the_best_fixed_alpha(name: str) -> None:
    """Fails when the cost of samples or of prefilling again is not fitted, when unfinished lengths
    are left out, or when α follows every single comparison.
    """
    assert of_the_best(name, tuned_run(name).factors[-1]) >= 0.95


@NAMES
def test_auto_changes_alpha_rarely_in_small_steps_and_gives_a_reason(name: str) -> None:
    """Fails when it goes to the best value at once, or compares at every step."""
    run = tuned_run(name)
    places = [GRID.index(factor) for factor in run.factors]
    assert run.changed_at
    assert np.abs(np.diff(places)).max() <= 2
    assert min(np.diff(run.changed_at), default=3) >= 3
    assert run.num_turns <= 1
    changes = [note for note in run.notes if "→" in note]
    assert len(changes) == len(run.changed_at)
    assert all(": " in note for note in changes)


def test_with_one_length_and_a_saturated_engine_auto_returns_to_one() -> None:
    """There is no tail to hide and nothing to gain from larger batches. Fails when a larger α stays
    although it gains nothing.
    """
    run = tuned_run("saturated")
    assert run.factors[-1] == 1
    assert run.notes[-1].endswith("1.5 → 1: as many tokens/s, and fresher ones")


@pytest.mark.soak
def test_auto_holds_max_off_policy_frac() -> None:
    """Fails when the budget is not checked, or α only grows by two grid points at a time."""
    run = tuned_run("off-policy")
    assert 0.8 < run.outcome.off_policy_token_frac <= 0.88
    assert any("stays below 2: at 2 the off-policy share is 0." in note for note in run.notes)


def test_auto_keeps_samples_within_the_kv_cache() -> None:
    """Fails when the samples in flight count without their context."""
    run = tuned_run("kv")
    assert 4000 < run.outcome.peak_kv_tokens <= 6000
    assert any("its KV cache has room for 6000" in note for note in run.notes)


@pytest.mark.soak
def test_auto_holds_the_staleness_cap_with_masking() -> None:
    """With masking, no step waits for old groups. Fails when the largest α does not depend on the
    cap.
    """
    run = tuned_run("masked")
    assert 1 < np.mean(run.staleness) <= 2
    assert max(run.factors) <= 3


def test_a_budget_that_no_alpha_can_meet_is_reported_once() -> None:
    """Fails when the warning comes at every comparison, or α still grows."""
    of = scenario()
    run = tune(of, tuner(of, Budgets(max_off_policy_frac=0.2, kv_cache_tokens=10**9)), num_steps=20)
    assert set(run.factors) == {1}
    assert len(run.notes) == 1
    assert "cannot hold a budget with any α" in run.notes[0]


@pytest.mark.parametrize(
    "other",
    [
        {"num_groups": 1, "group_size": 2},
        {"num_groups": 3, "group_size": 2, "max_response_tokens": 1},
        {"num_groups": 2, "group_size": 8, "no_signal_frac": 0.7, "is_filtered": True},
        {"num_engines": 3, "num_groups": 2},
    ],
)
def test_auto_works_with_very_few_samples(other: dict[str, object]) -> None:
    """One group, one token, many rejected groups, steps that only train ready groups. Fails when a
    step without ticks is fitted, or the number of finished samples is a divisor when there are
    none.
    """
    of = scenario(length_of=lambda sample_id: 1 + sample_id.prompt_id % 3, **other)
    run = tune(of, tuner(of), num_steps=18)
    assert 1 <= min(run.factors) <= max(run.factors) <= 4
    assert run.changed_at
    assert not any("failed" in note for note in run.notes)
    assert len(run.factors) < 18 or of.is_filtered


def test_equal_observations_give_equal_choices() -> None:
    """Fails when it draws from a shared random generator, or reads a clock."""
    first, set_up = tuned_run("kv"), SET_UPS["kv"]
    of = noisy(set_up.scenario, seed=0)
    again = tune(of, tuner(of, set_up.budgets), num_steps=12)
    assert again.factors == first.factors[: len(again.factors)]
    assert again.notes == first.notes[: len(again.notes)]
    assert len(again.changed_at) >= 2
