"""The algorithm's settings: every group composes, and contradictions are refused."""

from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from composed_config import load

from april_rl.config import config_dir
from april_rl.config.algorithm import PARTS
from april_rl.config.choices import Advantage, Correction, Kl, Loss, Ratio
from april_rl.config.store import ConfigError
from april_rl.config.user_code import OwnFunctionError
from april_rl.start.assembly.packer import load_age_weights
from april_rl.training.algorithm import advantages
from april_rl.training.algorithm.advantages import ADVANTAGES
from april_rl.training.learner.objective import Objective

GROUPS = sorted(path.stem for path in Path(config_dir(), "algorithm").glob("*.yaml"))


def load_tiny(*overrides: str) -> Any:
    return load("+recipe=tiny_cpu", *overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tiny(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_using_the_name_of_an_algorithm_as_loss_gives_an_error_with_its_parts() -> None:
    """Fails when a file in configs/algorithm has another loss or advantage, or is missing."""
    chosen = {group: load_tiny(f"algorithm={group}").algorithm for group in GROUPS}
    for key, known in (("loss", Loss), ("advantage", Advantage)):
        parts = {
            name: getattr(of, key) for name, of in chosen.items() if name not in known.__members__
        }
        assert PARTS[key] == parts


@pytest.mark.parametrize("group", GROUPS)
def test_every_algorithm_group_composes_into_the_settings_of_its_paper(group: str) -> None:
    """Fails when a file in configs/algorithm names a key or a value that the schema
    does not have.
    """
    algorithm = load_tiny(f"algorithm={group}").algorithm
    found = (
        algorithm.advantage,
        algorithm.loss,
        algorithm.aggregation.name,
        algorithm.clip_low,
        algorithm.clip_high,
        algorithm.dynamic_sampling,
    )
    assert (
        found
        == {
            "grpo": ("grpo", "ppo_clip", "token_mean", 0.2, 0.28, False),
            "dapo": ("grpo", "ppo_clip", "token_mean", 0.2, 0.28, True),
            "gspo": ("grpo", "gspo", "sequence_mean", 3e-4, 4e-4, False),
            "dr_grpo": ("dr_grpo", "ppo_clip", "constant_length", 0.2, 0.28, False),
            "cispo": ("grpo", "cispo", "token_mean", 1.0, 0.28, False),
            "dppo": ("grpo", "dppo_tv", "token_mean", 0.15, 0.15, False),
            "ppo": ("gae", "ppo_clip", "token_mean", 0.2, 0.2, False),
        }[group]
    )
    assert algorithm.kl is Kl.none
    decoupled = (Ratio.proximal, Correction.truncate)
    bypass = (Ratio.behaviour, Correction.none)
    assert (algorithm.ratio, algorithm.correction) == (bypass if group == "dppo" else decoupled)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["ratio=behaviour"], ["algorithm.correction", "algorithm.ratio=behaviour"]),
        (["ratio=behaviour", "correction=mask"], ["algorithm.correction", "algorithm.ratio="]),
        (["loss=policy_gradient", "clip_low=0.1"], ["algorithm.clip_low", "algorithm.loss="]),
        (["loss=sapo", "clip_high=0.3"], ["algorithm.clip_high", "algorithm.loss=sapo"]),
        (["loss=gspo", "dual_clip=3"], ["algorithm.dual_clip", "algorithm.loss=gspo"]),
        (
            ["loss=policy_gradient", "trainer.num_passes=2"],
            ["trainer.num_passes=2", "algorithm.loss=policy_gradient", "algorithm.ratio=behaviour"],
        ),
        (["loss=dppo_kl"], ["algorithm.loss=dppo_kl", "algorithm.ratio=behaviour"]),
        (["algorithm=dppo", "dual_clip=3"], ["algorithm.dual_clip", "algorithm.loss=dppo_tv"]),
        (["correction=none", "weight_bounds=[0,3]"], ["algorithm.weight_bounds=", "has no effect"]),
        (["weight_bounds=[0.5,3]"], ["algorithm.weight_bounds", "[0, high]"]),
        (["kl_coefficient=0.1"], ["algorithm.kl_coefficient", "algorithm.kl=none"]),
        (["kl=k3"], ["algorithm.kl_coefficient", "algorithm.kl=k3"]),
        (["overlong_penalty=3"], ["algorithm.overlong_penalty", "algorithm.overlong_buffer_frac"]),
        (["loss=gspo", "clip_low=1"], ["algorithm.clip_low", "algorithm.loss=gspo"]),
        (
            ["advantage=rloo", "rollout.group_size=1"],
            ["rollout.group_size", "algorithm.advantage=rloo"],
        ),
        (
            ["advantage=reinforce_pp", "dynamic_sampling=true", "rollout.group_size=1"],
            ["rollout.group_size", "algorithm.dynamic_sampling"],
        ),
        (
            ["learner.age_weight=a:b", "learner.age_decay=0.5"],
            ["learner.age_weight", "learner.age_decay=0.5"],
        ),
        (["advantage=gdpo"], ["algorithm.advantage=gdpo", "reward.functions", "got 0"]),
        (
            ["advantage=gdpo", "reward.functions={right: {function: exact}}"],
            ["algorithm.advantage=gdpo", "got 1: add one, or take algorithm.advantage=grpo"],
        ),
        (
            ["advantage=gdpo", "overlong_buffer_frac=0.5"],
            ["algorithm.overlong_buffer_frac=0.5", "algorithm.advantage=gdpo", "set it to 0"],
        ),
    ],
)
def test_contradicting_settings_are_refused_with_both_names(
    overrides: list[str], named: list[str]
) -> None:
    """Fails when a setting is accepted that nothing reads, or a loss that breaks invariant 7: GSPO
    may not leave out single tokens, and a group of one cannot be compared with itself.
    """
    message = refusal(
        *(
            each if "." in each.partition("=")[0] or "algorithm" in each else f"algorithm.{each}"
            for each in overrides
        )
    )
    for key in named:
        assert key in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss=policy_gradient", "algorithm.ratio=behaviour", "trainer.num_passes=2"],
        [
            "algorithm.ratio=behaviour",
            "algorithm.correction=none",
            "algorithm.geometric_mask=[0,2]",
        ],
        ["algorithm.loss=gspo", "algorithm.correction=sequence_truncate"],
        ["algorithm.loss=gspo", "rollout.on_stale=mask", "learner.age_weight=a:b"],
        ["rollout.group_size=1", "algorithm.advantage=reinforce_pp"],
        ["algorithm.kl=k3", "algorithm.kl_coefficient=0.1"],
    ],
)
def test_settings_that_work_together_are_accepted(overrides: list[str]) -> None:
    """They also reach their target. Fails when a check is stricter than its reason, or a value goes
    elsewhere.
    """
    config = load_tiny(*overrides)
    for key, _, given in (override.partition("=") for override in overrides):
        value = attrgetter(key)(config)
        assert (value.name if isinstance(value, Enum) else value) == yaml.safe_load(given), key


def test_every_advantage_uses_the_function_of_its_name() -> None:
    """Estimators over the batch get the whole batch. Fails when two are swapped."""
    others = {Advantage.gdpo, Advantage.grpo_by_turn, Advantage.gae, Advantage.none}
    assert ADVANTAGES.keys() == set(Advantage) - others
    groups = [[1.0, 0.0], [0.0, 0.0, 3.0]]
    for choice, estimator in ADVANTAGES.items():
        function = getattr(advantages, choice.name)
        is_of_batch = choice.name.startswith("reinforce_pp")
        whole = function if is_of_batch else advantages.by_group(function)
        num_tokens = [[4, 1], [2, 3, 1]]
        expected_groups = whole(groups, num_tokens)
        for found, expected in zip(estimator(groups, num_tokens), expected_groups, strict=True):
            assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("choice", [*Loss, *Correction, Kl.k2, Kl.k3, *Ratio])
def test_the_objective_can_be_built_for_every_choice(choice: Enum) -> None:
    """Fails when the learner does not know a word of the schema."""
    overrides = [f"algorithm.{type(choice).__name__.lower()}={choice.name}"]
    overrides += ["algorithm.kl_coefficient=0.1"] * isinstance(choice, Kl)
    is_bypass = choice in (Ratio.behaviour, Loss.dppo_tv, Loss.dppo_kl)
    overrides += ["algorithm.ratio=behaviour", "algorithm.correction=none"] * is_bypass
    objective = Objective(load_tiny(*overrides).algorithm)
    assert objective.needs_reference == isinstance(choice, Kl)
    assert objective.needs_proximal != is_bypass


def test_an_age_weight_function_is_called_once_per_age_and_weights_tokens() -> None:
    """Fails when the ages do not start at 0, or the last one is left out."""
    function = "learner.age_weight=age_functions:half_each_step"
    weights = load_age_weights(load_tiny(function, "rollout.max_staleness=3"))
    found = weights(np.array([0, 3, 1, 1], np.int32))
    assert found.tolist() == [1.0, 0.125, 0.5, 0.5]
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_such_module:weight", "cannot be used: there is no module"),
        ("age_functions:missing", "cannot be used: module age_functions has no function 'missing'"),
        ("age_functions:not_a_function", "is not a function: it is of type int"),
        ("age_functions:fails_at_age_2", "the ages 0 to 3 as a test: ZeroDivisionError"),
        ("age_functions:negative_weight", "the weight of age 1 must be a number >= 0, got -1"),
        ("age_functions:weight_as_text", "failed when called"),
        ("age_functions:age_itself", "gives age 0 the weight 0"),
    ],
)
def test_an_unusable_age_weight_function_is_refused_with_its_key(
    function: str, reason: str
) -> None:
    """Before anything is started. Fails when it is only tried for age 0, or its error ends the
    program with a traceback.
    """
    config = load_tiny(f"learner.age_weight={function}", "rollout.max_staleness=3")
    with pytest.raises(OwnFunctionError) as caught:
        load_age_weights(config)
    assert str(caught.value).startswith(f"learner.age_weight={function}")
    assert reason in str(caught.value)
