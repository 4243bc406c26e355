"""The settings of adapters: what they refuse, what they become, what they save."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from test_config import load

from april_rl.config.store import ConfigError
from april_rl.learner.lora import Lora
from april_rl.learning import lora_settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.rank=-1"], "lora.rank must be >= 0, got -1"),
        (["lora.rank=4", "lora.alpha=0"], "lora.alpha must be > 0, got 0"),
        (["lora.rank=4", "lora.alpha=inf"], "lora.alpha must be a finite number"),
        (["lora.rank=4", "lora.target_modules=[]"], "lora.target_modules must be null or names"),
        (["lora.rank=4", "lora.target_modules=['']"], "lora.target_modules must be null or names"),
        (
            ["lora.rank=4", "lora.target_modules=[q_proj,'.*']"],
            "lora.target_modules must be null or names",
        ),
        (["lora.alpha=16"], "lora.alpha=16.0 means nothing with lora.rank=0"),
        (["lora.target_modules=[q_proj]"], "lora.target_modules=['q_proj'] means nothing with"),
    ],
)
def test_adapters_that_make_no_sense_are_refused_in_one_line(
    overrides: list[str], message: str
) -> None:
    """Fails when a setting that nothing reads is taken, or peft gets a regular expression."""
    with pytest.raises(ConfigError) as caught:
        load("+recipe=tiny_cpu", *overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_by_default_the_whole_model_is_trained() -> None:
    assert lora_settings(load("+recipe=tiny_cpu")) is None


def test_the_settings_become_the_adapters_of_the_learner() -> None:
    config = load("+recipe=tiny_cpu", "lora.rank=4", "seed=7")
    settings = lora_settings(config)
    assert settings is not None
    assert Lora(**asdict(settings)) == Lora(rank=4, alpha=32.0, target_modules=None, seed=7)
    named = load(
        "+recipe=tiny_cpu", "lora.rank=1", "lora.alpha=2", "lora.target_modules=[q_proj,mlp.up]"
    )
    settings = lora_settings(named)
    assert settings is not None
    assert Lora(**asdict(settings)) == Lora(
        rank=1, alpha=2.0, target_modules=("q_proj", "mlp.up"), seed=0
    )
