"""Settings given as Python values arrive unchanged, even with odd text."""

from pathlib import Path

import numpy as np
import pytest

from april_rl.config.python_settings import as_overrides
from april_rl.config.schema import TrainConfig
from april_rl.config.store import ConfigError, compose_overrides, to_config

ODD_TEXTS = [
    "true",
    "NULL",
    "1e3",
    "",
    " x ",
    "it's \\",
    '"\\" {a: b}, [',
    "a\nb",
    "ü ✓",
    "#### (.+)",
]


def config_of(settings: dict[str, object]) -> TrainConfig:
    return to_config(compose_overrides(["+recipe=tiny_cpu", *as_overrides(settings)]))


def test_sections_lists_numbers_and_dotted_keys_are_set() -> None:
    config = config_of(
        {
            "trainer": {"num_steps": np.int64(3), "max_hours": np.float32(0.5)},
            "trainer.num_groups": 8,
            "optimizer": {"lr": 1e-5},
            "deterministic": True,
            "tracking": {"backends": ("tensorboard",)},
            "data": {"path": Path("a b.jsonl"), "chat_template_kwargs": {"think": False}},
        }
    )
    trainer = config.trainer
    assert (trainer.num_steps, trainer.max_hours, trainer.num_groups) == (3, 0.5, 8)
    assert (config.optimizer.lr, config.deterministic) == (1e-5, True)
    assert [backend.value for backend in config.tracking.backends] == ["tensorboard"]
    assert config.data.path == "a b.jsonl"
    assert config.data.chat_template_kwargs == {"think": False}


def test_named_entries_are_added_and_removed_as_on_the_command_line() -> None:
    sets = config_of({"evaluation": {"sets": {"held_out": None, "test": {"path": "t.jsonl"}}}})
    assert [(name, each.path) for name, each in sets.evaluation.sets.items()] == [
        ("test", "t.jsonl")
    ]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_text_arrives_unchanged(text: str) -> None:
    config = config_of({"data": {"instruction": text or None}, "reward": {"args": {"a": [text]}}})
    assert config.data.instruction == (text or None)
    assert config.reward.args == {"a": [text]}


def test_a_value_that_cannot_be_written_in_a_recipe_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"reward\.args is a function; a setting is text"):
        as_overrides({"reward": {"args": {"a": lambda: 0}}})
