"""What is said at the start about settings that never act."""

from __future__ import annotations

import pytest
from test_config import load

from april_rl.config.notes import inert_settings


def notes(*overrides: str, device: str = "cpu") -> list[str]:
    return list(inert_settings(load("+recipe=tiny_cpu", *overrides), device=device))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm=dapo"], "algorithm.clip_high and algorithm.dual_clip never act"),
        (["algorithm=gspo"], "algorithm.clip_low and algorithm.clip_high never act"),
        (["algorithm=cispo"], "clip_high never act"),
        (["algorithm.loss=sapo"], "sapo_negative_temperature never act"),
    ],
)
def test_one_update_a_batch_is_told_with_what_never_acts_and_what_to_set(
    overrides: list[str], named: str
) -> None:
    (line,) = notes(*overrides)
    assert named in line
    for part in ("trainer.num_minibatches=1", "loss/clip_frac", "algorithm.ratio=behaviour"):
        assert part in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.num_minibatches=2"],
        ["algorithm.ratio=behaviour", "algorithm.correction=none"],
        ["algorithm.loss=policy_gradient"],
    ],
)
def test_nothing_is_said_where_ratios_differ_from_one_or_do_not_exist(
    overrides: list[str],
) -> None:
    assert notes(*overrides) == []


def test_half_of_the_rewards_span_is_the_most_that_dapo_takes_off() -> None:
    """DAPO takes 1 off rewards of -1 and 1, in the last 4,096 of 20,480 tokens."""
    algorithm = load("+recipe=tiny_cpu", "algorithm=dapo").algorithm
    assert (algorithm.overlong_buffer_frac, algorithm.overlong_penalty) == (4096 / 20480, 0.5)


def test_the_flagships_overlong_buffer_begins_at_the_expected_maximum() -> None:
    config = load("+recipe=qwen3_4b_dapo")
    before = 1 - config.algorithm.overlong_buffer_frac
    assert before * config.rollout.max_response_tokens == 16384
    assert list(inert_settings(config, device="cuda")) == []


def test_sleep_is_told_to_have_no_effect_on_cpu() -> None:
    always = ("engine.sleep=always", "trainer.num_minibatches=2")
    (line,) = notes(*always)
    assert line == "engine.sleep=always has no effect on CPU, where no engine sleeps; remove it"
    assert notes(*always, device="cuda") == []
    assert notes("engine.sleep=never", "trainer.num_minibatches=2") == []
