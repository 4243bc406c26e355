"""Settings of a teacher, and which others go with it."""

import pytest
from composed_config import load

from april_rl.config.store import ConfigError

TEACHER = "teacher.path=builtin:tiny_teacher"


def test_a_teacher_may_stand_beside_a_reward_or_alone():
    assert load("+recipe=tiny_cpu", TEACHER).algorithm.advantage == "grpo"
    alone = load("+recipe=tiny_cpu", TEACHER, "algorithm.advantage=none", "rollout.group_size=1")
    assert alone.rollout.group_size == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage=none"], "trains nothing without a teacher: set teacher.path"),
        (["teacher.weight=0.5"], "teacher.weight=0.5 has no effect without teacher.path"),
        ([TEACHER, "teacher.weight=0"], "teacher.weight must be > 0"),
        ([TEACHER, "algorithm.loss=gspo"], "gives every token its own: take .*gspo_token"),
        (
            [TEACHER, "algorithm.advantage=none", "algorithm.dynamic_sampling=true"],
            "rejects groups of equal rewards, which algorithm.advantage=none does not read",
        ),
    ],
)
def test_what_contradicts_a_teacher_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load("+recipe=tiny_cpu", *overrides)
