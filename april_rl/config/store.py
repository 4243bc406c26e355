"""How Hydra finds the schema, the configs and the recipes: in a checkout or an installed package.

A Hydra config group is a directory name, so a top-level `recipes/` cannot serve `+recipe=` by
itself: every `recipes/**/*.yaml` is registered in the ConfigStore under the group
`recipe`, package `_global_`.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from april_rl.config.schema import TrainConfig
from april_rl.errors import RunError

_PACKAGE = Path(__file__).resolve().parent.parent


class ConfigError(RunError):
    """A setting is wrong; the message names its key and what to do."""


def _folder(name: str) -> Path:
    """The folder inside the package when installed, beside it in a checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def config_dir() -> str:
    """The absolute path of `configs/`, as Hydra's `config_path` wants it."""
    return str(_folder("configs"))


def recipes() -> dict[str, Path]:
    """Every recipe's name (its path under `recipes/` without the ending) and file."""
    root = _folder("recipes")
    return {
        path.relative_to(root).with_suffix("").as_posix(): path
        for path in sorted(root.rglob("*.yaml"))
    }


def register() -> None:
    """Put the schema and every recipe into Hydra's ConfigStore."""
    store = ConfigStore.instance()
    store.store(name="schema", node=TrainConfig)
    for name, path in recipes().items():
        group, _, leaf = f"recipe/{name}".rpartition("/")
        store.store(group=group, name=leaf, node=OmegaConf.load(path), package="_global_")


def to_config(composed: DictConfig) -> TrainConfig:
    """The composed configuration as checked dataclasses.

    Raises ConfigError naming the key for a missing value, a wrong type or a value out of range.
    """
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set: give it on the command line, "
            f"or choose a recipe with +recipe=NAME ({', '.join(recipes())})"
        )
    _refuse_unknown(composed)
    try:
        config = OmegaConf.to_object(composed)
    except (OmegaConfBaseException, HydraException, ValueError) as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, TrainConfig), type(config)
    return config


def _refuse_unknown(section: DictConfig, prefix: str = "") -> None:
    """Raise ConfigError for the first key that `+key=value` has added to the schema."""
    schema = OmegaConf.get_type(section)
    if not is_dataclass(schema):
        return
    known = [entry.name for entry in fields(schema)]
    for key in map(str, section):
        if key not in known:
            likely = get_close_matches(key, known) or known
            raise ConfigError(
                f"{prefix}{key} is not a setting; did you mean "
                f"{' or '.join(prefix + name for name in likely)}?"
            )
        if isinstance(section[key], DictConfig):
            _refuse_unknown(section[key], f"{prefix}{key}.")
