"""Values that the schema accepts or refuses, beyond the ranges of single settings."""

import math
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass

import pytest
from composed_config import SECTIONS, load

from april_rl.config import TrainConfig
from april_rl.config.consistency import check_consistency
from april_rl.config.store import ConfigError
from april_rl.config.task import EvaluationConfig, EvaluationSetConfig


@pytest.mark.parametrize("name", ["a b", "a/b", "größe", ""])
def test_an_evaluation_set_with_an_invalid_name_is_refused(name: str) -> None:
    """Fails when only the metrics refuse it, after the first evaluation."""
    with pytest.raises(ValueError, match=f"^evaluation.sets.{name}: a name has"):
        EvaluationConfig(
            sets={
                "Test-1.b_2": EvaluationSetConfig(path="x.jsonl"),
                name: EvaluationSetConfig(path="y.jsonl"),
            }
        )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_setting_accepts_nan_or_infinity(value: float) -> None:
    """Checks every float of the schema. Fails when the search over the sections misses one."""
    taken = []
    for name, section in SECTIONS.items():
        for entry in fields(section) if is_dataclass(section) else ():
            if not isinstance(getattr(section(), entry.name), float):
                continue
            with suppress(ValueError):
                check_consistency(TrainConfig(**{name: section(**{entry.name: value})}))
                taken.append(f"{name}.{entry.name}")
    assert taken == []


def test_the_bounds_of_a_range_are_accepted() -> None:
    config = load(
        "+recipe=tiny_cpu",
        "seed=4294967295",
        "rollout.drain_steps=99",
        "optimizer.warmup_steps=599",
        "trainer.num_minibatches=2",
        "trainer.num_passes=3",
        "algorithm.overlong_buffer_frac=1",
    )
    assert (config.seed, config.rollout.drain_steps) == (2**32 - 1, config.trainer.num_steps - 1)
    assert config.trainer.num_optimizer_steps == 6 * config.trainer.num_steps == 600
    assert config.algorithm.overlong_buffer_frac == 1


def test_names_that_users_choose_can_be_set_with_and_without_a_plus() -> None:
    fixed = ["data.path=", "model.path=m", "data.sampler=pass_rate"]
    named = [
        "data.sampler_args={low: 0.1}",
        "data.chat_template_kwargs.enable_thinking=false",
        "reward.args={power: 2}",
        "data.sources.a={path: a.jsonl}",
        "evaluation.sets.new={path: a.jsonl}",
    ]
    config = load(*fixed, *named)
    assert config == load(*fixed, *(f"+{override}" for override in named))
    assert config.data.sampler_args == {"low": 0.1}
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert config.reward.args == {"power": 2}
    assert config.data.sources["a"].path == config.evaluation.sets["new"].path == "a.jsonl"


BY_TURN = (
    "environment.function=april_rl.task.environments.tiny_sums:Sums",
    "data.environment=true",
    "algorithm.advantage=grpo_by_turn",
)
SOURCES = (
    "+recipe=tiny_cpu",
    "+data.sources.a={path: a.jsonl}",
    "+data.sources.b={path: b.jsonl}",
    "data.path=''",
)

TEACHER = "teacher.path=builtin:tiny_teacher"
SERVER = "teacher.base_url=http://t/v1"
K1 = ("algorithm.kl=k1", "algorithm.kl_coefficient=0.1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.advantage=grpo_by_turn"],
            "algorithm.advantage=grpo_by_turn equals grpo if no environment rewards turns",
        ),
        (
            [*BY_TURN, "reward.function=exact"],
            "algorithm.advantage=grpo_by_turn compares the rewards of turns, and the reward of "
            "data.path does not have them",
        ),
        (
            [
                *BY_TURN,
                *SOURCES,
                "+reward.functions.f={function: exact}",
                "+reward.functions.g={function: environment, sources: [a, held_out]}",
            ],
            "and the reward of data.sources.b does not have them",
        ),
        (
            [*BY_TURN, "+reward.functions.g={function: environment, weight: 0}"],
            "and a weight other than 0",
        ),
        (
            [*SOURCES[1:], "+evaluation.sets.b={path: c.jsonl}"],
            "data.sources and evaluation.sets both have b: ",
        ),
        (
            ["data.environment=true"],
            "data.environment=true needs environment.function (a class, tools or an agent) or",
        ),
        (
            ["reward.function=environment"],
            "the reward function environment reads what an environment gave, and there is none",
        ),
        (
            ["+reward.functions.g={function: environment}"],
            "the reward function environment reads what an environment gave, and there is none",
        ),
        (
            ["environment.function=a:run"],
            "environment.function=a:run has no effect: no data set has an environment",
        ),
        (
            ["environment.function=a:run", "environment.command=b", "data.environment=true"],
            "environment.function and environment.command: an episode has one of them",
        ),
        (
            ["environment.command=b", "+environment.args.a=1", "data.environment=true"],
            "environment.args are keyword arguments, and environment.command takes none",
        ),
        (
            ["environment.function=run", "data.environment=true"],
            "environment.function must be module:Class or module:function, got run",
        ),
        (
            ["+reward.functions.f={function: exact, sources: [a]}"],
            "reward.functions.f.sources names a; data.sources and evaluation.sets have held_out",
        ),
        (
            ["+reward.functions.f={function: exact, sources: [held_out]}"],
            "no function of reward.functions scores data.path",
        ),
        (
            [*SOURCES, "+reward.functions.f={function: exact, sources: [a, c]}"],
            "reward.functions.f.sources names c; data.sources and evaluation.sets have a, b",
        ),
        (
            [*SOURCES, "+reward.functions.f={function: exact, sources: [a]}"],
            "no function of reward.functions scores b",
        ),
        (
            ["checkpoint.best_metric=eval/helt_out/avg_at_k"],
            "eval/helt_out/avg_at_k is not measured; choices: eval/held_out/avg_at_k",
        ),
        (["lora.rank=4", "lora.alpha=0"], "lora.alpha must be > 0, got 0"),
        (["lora.rank=4", "lora.alpha=inf"], "lora.alpha must be a finite number"),
        (["lora.rank=4", "lora.target_modules=[]"], "lora.target_modules must be null or names"),
        (["lora.rank=4", "lora.target_modules=['']"], "lora.target_modules must be null or names"),
        (
            ["lora.rank=4", "lora.target_modules=[q_proj,'.*']"],
            "lora.target_modules must be null or names",
        ),
        (
            ["lora.rank=513", "lora.sync=adapter"],
            "lora.rank=513: vLLM's LoRA layers have at most rank 512",
        ),
        (["lora.sync=adapter"], "has no effect without lora.rank; set lora.rank"),
        (
            ["learner.router_replay=engine", "engine.prefix_caching=false"],
            "learner.router_replay=engine needs engine.prefix_caching=true",
        ),
        (
            ["trainer.num_steps=4", "profiler.steps=[0,3,5]"],
            "profiler.steps=[0, 3, 5] names steps that the run does not have: [0, 5]",
        ),
        (["lora.alpha=16"], "lora.alpha=16.0 has no effect without lora.rank"),
        (["lora.target_modules=[q_proj]"], "lora.target_modules=['q_proj'] has no effect without"),
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
        (["algorithm=ppo", "critic.warmup_steps=100"], "critic.warmup_steps must be < "),
        (["algorithm=ppo", "critic.value_lambda=1.5"], "critic.value_lambda must be in"),
        (["algorithm.reference_every=5"], "reference_every=5 has no effect with algorithm.kl=none"),
        (
            [*K1, "algorithm.reference_every=5", "lora.rank=4"],
            "policy without its adapters, which does not move",
        ),
    ],
)
def test_settings_that_do_not_work_together_are_refused_in_one_line(overrides, message) -> None:
    """Fails when a reward has no data set, a best metric is never measured, or a setting is
    accepted that nothing reads.
    """
    recipe = [] if "+recipe=tiny_cpu" in overrides else ["+recipe=tiny_cpu"]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(*recipe, *overrides)
    assert "\n" not in str(caught.value)


def test_a_teacher_works_with_or_without_a_reward() -> None:
    assert load("+recipe=tiny_cpu", TEACHER).algorithm.advantage == "grpo"
    alone = load("+recipe=tiny_cpu", TEACHER, "algorithm.advantage=none", "rollout.group_size=1")
    assert alone.rollout.group_size == 1
    assert load("+recipe=tiny_cpu", "algorithm=ppo", "rollout.group_size=1").critic.path is None
