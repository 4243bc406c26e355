"""The over-sampling factor on its way from the command line to engines and collector."""

from composed_config import load

from april_rl.start.planning.sizes import num_slots, tick_steps


def test_as_many_samples_are_in_flight_as_the_factor_says() -> None:
    size = ("trainer.num_groups=4", "rollout.group_size=4", "rollout.over_sampling_factor=1.3")
    assert num_slots(load("+recipe=tiny_cpu", *size)) == 21


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
