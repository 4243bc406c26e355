"""The configuration as Hydra composes it from recipes and overrides."""

from dataclasses import fields

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from april_rl.config import TrainConfig, config_dir, register, to_config
from april_rl.config.store import ConfigError

SECTIONS = {entry.name: type(getattr(TrainConfig(), entry.name)) for entry in fields(TrainConfig)}


def load(*overrides: str) -> TrainConfig:
    register()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("train", list(overrides)))


def refusal(*overrides: str) -> str:
    """Return what Hydra's command line prints: the error and its cause."""
    with pytest.raises((ConfigError, HydraException, OmegaConfBaseException)) as caught:
        load(*overrides)
    return f"{caught.value}\n{caught.value.__cause__ or ''}"
