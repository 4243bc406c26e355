"""Settings of a teacher, a critic and an updated reference, and which other settings work with
them.
"""

import pytest
from composed_config import load

from april_rl.config.store import ConfigError

TEACHER = "teacher.path=builtin:tiny_teacher"
SERVER = "teacher.base_url=http://t/v1"
K1 = ("algorithm.kl=k1", "algorithm.kl_coefficient=0.1")


def test_a_teacher_works_with_or_without_a_reward():
    assert load("+recipe=tiny_cpu", TEACHER).algorithm.advantage == "grpo"
    alone = load("+recipe=tiny_cpu", TEACHER, "algorithm.advantage=none", "rollout.group_size=1")
    assert alone.rollout.group_size == 1
    assert load("+recipe=tiny_cpu", "algorithm=ppo", "rollout.group_size=1").critic.path is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage=none"], "trains nothing without a teacher: set teacher.path"),
        (["teacher.weight=0.5"], "teacher.weight=0.5 has no effect without teacher.path"),
        ([TEACHER, "teacher.weight=0"], "teacher.weight must be > 0"),
        (
            [TEACHER, "algorithm.advantage=none", "algorithm.dynamic_sampling=true"],
            "rejects groups of equal rewards, which algorithm.advantage=none does not read",
        ),
        (["critic.lr=1e-4"], "critic.lr=0.0001 has no effect with algorithm.advantage=grpo"),
        ([TEACHER, SERVER], "there is one teacher; set one of the two to null"),
        ([SERVER], "teacher.base_url=http://t/v1 needs teacher.model, the teacher's name there"),
        (["teacher.model=t"], "teacher.model=t has no effect without teacher.base_url; set "),
        ([TEACHER, "teacher.model=t"], "teacher.model=t has no effect without teacher.ba"),
        (
            [SERVER, "teacher.model=t", "rollout.temperature=0.7"],
            "log-probabilities are at temperature 1, so rollout.temperature must be 1, got 0.7",
        ),
        (["algorithm=ppo", "critic.warmup_steps=100"], "critic.warmup_steps must be < .*100"),
        (["algorithm=ppo", "critic.value_lambda=1.5"], "critic.value_lambda must be in"),
        (["algorithm.reference_every=5"], "reference_every=5 has no effect with algorithm.kl=none"),
        (
            [*K1, "algorithm.reference_every=5", "lora.rank=4"],
            "policy without its adapters, which does not move",
        ),
    ],
)
def test_contradicting_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load("+recipe=tiny_cpu", *overrides)
