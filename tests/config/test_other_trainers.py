"""Settings of other trainers give errors that name ours, as docs/coming_from.md says."""

import re
from collections import Counter

import pytest

from april_rl.config.other_trainers import names
from april_rl.config.schema import TrainConfig
from april_rl.config.wrong_settings import keys, unknown_setting


def test_every_column_of_the_page_gives_names() -> None:
    counts = Counter(each.trainer for each in names())
    assert counts.keys() == {"TRL", "verl", "slime", "OpenRLHF"}
    assert min(counts.values()) > 50


def test_every_suggestion_is_a_setting_or_a_sentence() -> None:
    settings = {*keys(TrainConfig), "hydra.run.dir"}
    here = {each.here for each in names()}
    ours = {re.split("[,;=]", each)[0] for each in here}
    assert ours - settings == {"always vLLM", "no top-p or top-k in training"}


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("algorithm.beta", "TRL's beta is here: algorithm.kl_coefficient"),
        ("rollout.n", "verl's actor_rollout_ref.rollout.n is here: rollout.group_size"),
        (
            "custom_reward_function.path",
            "verl's custom_reward_function.path is here: reward.function, as module:function",
        ),
        ("adv_estimator", "verl's adv_estimator is here: algorithm.advantage"),
        ("resume_from_checkpoint", "TRL's resume_from_checkpoint is here: resume=auto"),
        ("actor_learning_rate", "OpenRLHF's --actor_learning_rate is here: optimizer.lr"),
    ],
)
def test_a_setting_of_another_trainer_gives_an_error_with_ours(key: str, answer: str) -> None:
    message = f"{key} is not a setting; {answer} (docs/coming_from.md)"
    assert unknown_setting(key, TrainConfig) == message


@pytest.mark.parametrize("key", ["actor_rollout_ref", "actor_rollout_ref.rollout"])
def test_a_section_of_another_trainer_is_recognised(key: str) -> None:
    assert unknown_setting(key, TrainConfig) == (
        f"{key} is not a setting; it is a section of verl; docs/coming_from.md has its settings"
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rank", "did you mean lora.rank?"),
        ("trainer.steps", "did you mean trainer.num_steps?"),
        ("trainer.minibatches", "did you mean trainer.num_minibatches?"),
        ("rollout.size", "did you mean rollout.group_size?"),
        ("steps", "did you mean trainer.num_steps?"),
        ("model.name", "model has path"),
    ],
)
def test_a_name_without_its_section_gives_an_error_with_ours(key: str, hint: str) -> None:
    assert unknown_setting(key, TrainConfig) == f"{key} is not a setting; {hint}"
