"""The over-sampling factor on its way from the command line to engines and collector."""

import pytest
from composed_config import load, refusal

from april_rl.start.planning.sizes import num_slots, tick_steps


@pytest.mark.parametrize(("given", "read"), [("1", 1), ("2.5", 2.5), ("auto", "auto")])
def test_the_over_sampling_factor_is_a_number_or_auto(given: str, read: object) -> None:
    """Fails when the schema only accepts floats."""
    config = load("+recipe=tiny_cpu", f"rollout.over_sampling_factor={given}")
    assert config.rollout.over_sampling_factor == read


def test_a_budget_without_auto_and_auto_in_a_reproducible_run_are_refused() -> None:
    """Fails when either check is missing."""
    budget = refusal("+recipe=tiny_cpu", "rollout.max_off_policy_frac=0.5")
    assert "has no effect with rollout.over_sampling_factor=" in budget
    auto = ("+recipe=tiny_cpu", "rollout.over_sampling_factor=auto")
    assert load(*auto, "rollout.max_off_policy_frac=0.5").rollout.max_off_policy_frac == 0.5
    assert "follows the seconds" in refusal(*auto, "deterministic=true")
    assert "rollout.max_staleness must be >= 1" in refusal(*auto, "rollout.max_staleness=0")


def test_engines_are_built_for_the_largest_factor_that_auto_may_choose() -> None:
    """Fails when they are built for α = 1, where it begins."""
    size = ("trainer.num_groups=4", "rollout.group_size=4")
    auto = ("+recipe=tiny_cpu", "rollout.over_sampling_factor=auto", *size)
    assert num_slots(load(*auto)) == 64
    assert num_slots(load(*auto, "rollout.max_staleness=1")) == 32
    assert num_slots(load("+recipe=tiny_cpu", "rollout.over_sampling_factor=1.5", *size)) == 24


def test_ticks_are_longer_with_hundreds_of_engines_unless_their_length_is_set() -> None:
    """Fails when auto ignores engines, budget or turns, or overrides a number."""
    large = ("rollout.max_response_tokens=4096", "learner.max_tokens=5000")
    auto = load("+recipe=tiny_cpu", "rollout.tick_steps=auto", *large)
    steps = [tick_steps(auto, num_engines=number) for number in (1, 8, 64, 128, 512, 10_000)]
    assert steps == [32, 32, 32, 32, 64, 64]
    turns = load("+recipe=tiny_tools_cpu", "rollout.tick_steps=auto", *large)
    assert tick_steps(turns, num_engines=8) == 8
    short = load("+recipe=tiny_cpu", "rollout.tick_steps=auto", "rollout.max_response_tokens=256")
    assert tick_steps(short, num_engines=512) == 8
    assert tick_steps(load("+recipe=tiny_cpu", "rollout.tick_steps=3"), num_engines=512) == 3
