"""Settings of other trainers give errors that name ours, and these agree with the page."""

import re
from pathlib import Path

import pytest

from april_rl.config.other_trainers import NAMES
from april_rl.config.schema import TrainConfig
from april_rl.config.wrong_settings import unknown_setting

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
FIRST_NAME = re.compile(r"`(-{0,2}[\w.-]+)")


def rows() -> list[dict[str, str]]:
    """Return the rows of the page's tables, cells by column."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(("here", *NAMES), row, strict=True)) for row in cells if row[0] != "here"]


def names(cell: str) -> list[str]:
    return [name.partition("=")[0].partition(" ")[0] for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("trainer", NAMES)
def test_every_suggestion_is_in_a_row_of_the_page(trainer: str) -> None:
    for name, here in NAMES[trainer].items():
        found = [row["here"].replace("`", "") for row in rows() if name in names(row[trainer])]
        assert any(here in cell for cell in found), f"{trainer}'s {name}: {here} not in {found}"


@pytest.mark.parametrize("trainer", NAMES)
def test_every_row_of_the_page_can_be_a_suggestion(trainer: str) -> None:
    """The first name in a cell is known, except for names that are the same here."""
    for row in rows():
        first = FIRST_NAME.match(row[trainer])
        if first and first[1] not in row["here"] and "no top-p" not in row["here"]:
            assert first[1] in NAMES[trainer] or first[1] in ("model", "accelerate")


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("algorithm.beta", "TRL's beta is here: algorithm.kl_coefficient"),
        ("rollout.n", "verl's actor_rollout_ref.rollout.n is here: rollout.group_size"),
        (
            "custom_reward_function.path",
            "verl's custom_reward_function.path is here: reward.function",
        ),
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
