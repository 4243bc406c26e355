"""The settings of adapters: what they refuse."""

from __future__ import annotations

import pytest
from composed_config import load

from april_rl.config.store import ConfigError


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
        (["lora.alpha=16"], "lora.alpha=16.0 has no effect with lora.rank=0"),
        (["lora.target_modules=[q_proj]"], "lora.target_modules=['q_proj'] has no effect with"),
    ],
)
def test_invalid_lora_settings_are_refused_in_one_line(overrides: list[str], message: str) -> None:
    """Fails when a setting that nothing reads is taken, or peft gets a regular expression."""
    with pytest.raises(ConfigError) as caught:
        load("+recipe=tiny_cpu", *overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_by_default_the_whole_model_is_trained() -> None:
    assert load("+recipe=tiny_cpu").lora.rank == 0
