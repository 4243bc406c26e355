"""Register schema, configs and recipes with Hydra, in a checkout or an installed package.

A Hydra config group is a directory name, so a top-level `recipes/` cannot serve `+recipe=` by
itself: every `recipes/**/*.yaml` is registered in the ConfigStore under the group `recipe`, package
`_global_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from april_rl.config.consistency import check_consistency
from april_rl.config.folders import shipped_folder
from april_rl.config.schema import TrainConfig
from april_rl.config.secrets import mask, with_references, without_absent
from april_rl.config.task import EvaluationSetConfig, RewardFunctionConfig, SourceConfig
from april_rl.config.wrong_settings import (
    LIST_OF_RECIPES,
    expected_value,
    explain,
    keys,
    wrong_section,
)
from april_rl.errors import RunError

# Mappings whose keys the user chooses, with the type of each entry.
NAMED_BY_USERS: dict[str, type] = {
    "data.sources": SourceConfig,
    "reward.functions": RewardFunctionConfig,
    "evaluation.sets": EvaluationSetConfig,
}
# Groups without a default; Hydra requires a plus before them.
_OPTIONAL_GROUPS = ("recipe", "schedule", "sweep")
_FOLDER_OPTIONS = ("--config-dir", "-cd")
_own_folders: list[Path] = []  # folders that `register_folder` was given
# Why a file could not be registered, by the name that it would have.
_unusable_files: dict[str, str] = {}


class ConfigError(RunError):
    """A setting is wrong; the message names its key and the remedy."""


def config_dir() -> str:
    """Return the absolute path of `configs/`, for Hydra's `config_path`."""
    return str(shipped_folder("configs"))


def _yaml_files(root: Path) -> dict[str, Path]:
    """Return every YAML file below `root` by its relative path without the suffix."""
    return {
        path.relative_to(root).with_suffix("").as_posix(): path
        for path in sorted(root.rglob("*.yaml"))
    }


@cache
def recipes() -> dict[str, Path]:
    """Return the file of every recipe by name, including the recipes of `register_folder`."""
    return _yaml_files(shipped_folder("recipes"))


@cache
def register() -> None:
    """Register the schema and every recipe in Hydra's ConfigStore, once for each process."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_open_schema())
    for name, path in recipes().items():
        _store(f"recipe/{name}", path)


def without_folder(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--config-dir FOLDER`, after registering the files in FOLDER as
    `register_folder` does: Hydra reads them for training only, and wants a header in recipes.
    """
    found, words = [], iter(arguments)
    for word in words:
        option, has_value, value = word.partition("=")
        if option in _FOLDER_OPTIONS:
            register_folder(Path(value if has_value else next(words, "")))
        else:
            found.append(word)
    return found


def register_folder(folder: Path) -> None:
    """Register the files of a user's folder: files in `recipe/` as recipes, any other file as an
    option of the group that its folder names. Raise ConfigError for a file whose name is taken.
    A file that cannot be read stops only commands that use it.
    """
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder} is not a folder")
    _own_folders.append(folder.resolve())
    shipped = _yaml_files(shipped_folder("configs"))
    for name, path in _yaml_files(folder).items():
        group, _, recipe = name.partition("/")
        if name in shipped or (group == "recipe" and recipes().get(recipe, path) != path):
            raise ConfigError(f"{path}: there is a {name} already; give the file another name")
        if group == "recipe":
            recipes()[recipe] = path
        else:
            moved = folder / "recipe" / f"{name}.yaml"
            _unusable_files[f"recipe/{name}"] = f"{path} is not a recipe: move it to {moved}"
        _store(name, path)


def folder_options() -> list[str]:
    """Return the options of a command line that register the same folders again."""
    return [
        word for folder in dict.fromkeys(_own_folders) for word in ("--config-dir", str(folder))
    ]


def _store(name: str, path: Path) -> None:
    group, _, leaf = name.rpartition("/")
    is_recipe = name.startswith("recipe/")
    try:
        node = OmegaConf.load(path)
    except (OSError, YAMLError) as error:
        _unusable_files[name] = f"{path}{_fault(error)}"
        return
    if not isinstance(node, DictConfig) or not node:
        _unusable_files[name] = f"{path} must have settings, KEY: VALUE on each line"
        return
    plain, section = OmegaConf.to_container(node), "" if is_recipe else group.replace("/", ".")
    assert isinstance(plain, dict)
    if wrong := wrong_section(plain, TrainConfig, section=section):
        _unusable_files[name] = f"{path}: {wrong}"
        return
    package = "_global_" if is_recipe else None
    _unusable_files.pop(name, None)
    ConfigStore.instance().store(group=group or None, name=leaf, node=node, package=package)


def _fault(error: Exception) -> str:
    """Return the text that follows the file's name in a message, with the line of invalid YAML."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f":{error.problem_mark.line + 1}: not valid YAML: {error.problem}"
    return f" cannot be read: {' '.join(str(error).split())}"


@cache
def _schema() -> DictConfig:
    """Return the schema; made once, since it takes a third of `to_config`. Never change it."""
    schema: DictConfig = OmegaConf.structured(TrainConfig)
    return schema


def _open_schema() -> DictConfig:
    """Return the schema with untyped mappings where the user names the entries.

    Hydra refuses `+evaluation.sets.test={path: ...}` when the entries have a type; `to_config`
    adds the type. New names can also be set without a plus, like any other setting. Null empties
    any mapping.
    """
    schema: DictConfig = OmegaConf.structured(TrainConfig)
    for key in NAMED_BY_USERS:
        OmegaConf.select(schema, key)._metadata.element_type = Any
    for key in _mappings():
        section, _, name = key.rpartition(".")
        node = OmegaConf.select(schema, section)._get_node(name)
        node._metadata.optional = True
        node._metadata.ref_type = Any  # entries can then be set after null has removed others
        OmegaConf.set_struct(node, False)
    return schema


@cache
def _mappings() -> Sequence[str]:
    """Return every mapping. Their values are merged, so only null can remove inherited ones."""
    return [key for key in keys(TrainConfig) if OmegaConf.select(_schema(), key) == {}]


def as_hydra_takes(overrides: Iterable[str]) -> list[str]:
    """Return overrides with a plus where Hydra requires one, so that users need not know the rule:
    before groups that no default names, and two before entries of mappings, which null may have
    removed.
    """
    found = []
    for override in overrides:
        bare = override.lstrip("+")
        key = bare.partition("=")[0].partition("@")[0]
        if key in _OPTIONAL_GROUPS:
            found.append(f"+{bare}")
        elif any(key.startswith(f"{one}.") for one in _mappings()):
            found.append(f"++{bare}")
        elif key.partition(".")[0] in TrainConfig.__dataclass_fields__:
            found.append(bare)
        else:
            found.append(override)
    return found


def in_our_words(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Return an error of Hydra or OmegaConf as a ConfigError that names the key and its values."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file in _unusable_files:
        return ConfigError(_unusable_files[str(error.missing_cfg_file)])
    return ConfigError(explain(error, schema=TrainConfig, overrides=overrides, recipes=recipes()))


def compose_overrides(overrides: Sequence[str]) -> DictConfig:
    """Return what `python -m april_rl.train` composes from these overrides; raise ConfigError."""
    register()
    try:
        with initialize_config_dir(config_dir(), version_base="1.3"):
            return compose("train", overrides=as_hydra_takes(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise in_our_words(error, overrides) from None


def to_config(composed: DictConfig) -> TrainConfig:
    """Return the composed configuration as checked dataclasses; raise ConfigError with the key."""
    try:
        return _check(composed)
    except (OmegaConfBaseException, HydraException) as error:
        raise in_our_words(error, ()) from None
    except ValueError as error:
        raise ConfigError(str(error)) from error


def run_config(path: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Return the checked configuration of a run's `config.yaml` at `path`, with `changes` as
    KEY=VALUE. References to environment variables that this machine lacks stay as they are. Raise
    ConfigError when there is no such file, or this version cannot read it.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path.parent} is not the directory of a run: it has no {path.name}; give the folder "
            f"that holds {path.name}"
        )
    try:
        found = without_absent(OmegaConf.to_container(OmegaConf.load(path)))
        saved = _without_nulls(OmegaConf.create(found))
        changed = OmegaConf.from_dotlist(list(changes))
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), saved, changed)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    assert isinstance(merged, DictConfig)
    return to_config(merged)


def _check(composed: DictConfig) -> TrainConfig:
    missing = sorted(OmegaConf.missing_keys(composed))
    if "data.path" in missing and composed.data.sources:
        missing.remove("data.path")
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set: give it on the command line, "
            f"or choose a recipe with +recipe=NAME, such as tiny_cpu ({LIST_OF_RECIPES})"
        )
    config = OmegaConf.to_object(OmegaConf.merge(_schema(), _plain(composed)))
    assert isinstance(config, TrainConfig), type(config)
    check_consistency(config)
    return config


def as_plain(composed: DictConfig) -> dict[str, object]:
    """Return the composed configuration as plain data, for config.yaml. References to
    environment variables stay references, and values of secret ones become references. Raise
    ConfigError for a reference to a missing setting.
    """
    try:
        shown = OmegaConf.create(
            with_references(OmegaConf.to_container(composed, enum_to_str=True))
        )
        plain = mask(OmegaConf.to_container(shown, resolve=True))
    except OmegaConfBaseException as error:
        raise in_our_words(error, ()) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def plain_config(config: TrainConfig) -> dict[str, object]:
    """Return a checked configuration as plain data, as in `config.yaml` of a run."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _plain(composed: DictConfig) -> DictConfig:
    """Return the composed values without their types, and without entries that null has removed."""
    plain = OmegaConf.create(OmegaConf.to_container(composed, enum_to_str=True))
    assert isinstance(plain, DictConfig)
    _without_nulls(plain)
    if plain.data.sources and OmegaConf.is_missing(plain.data, "path"):
        plain.data.path = ""
    return plain


def _without_nulls(settings: DictConfig | ListConfig) -> DictConfig | ListConfig:
    """Empty the mappings that are null, and remove the entries `KEY.NAME=null` from the ones whose
    names the user chooses. In an entry that stays, `args: null` is the default. Raise ConfigError
    for a mapping that is something else.
    """
    for key in _mappings():
        section, _, name = key.rpartition(".")
        found = OmegaConf.select(settings, section)
        if isinstance(found, DictConfig) and name in found and found[name] is None:
            found[name] = {}
        value = OmegaConf.select(settings, key, default={})
        if not isinstance(value, Mapping):
            wanted = expected_value(key, TrainConfig)
            raise ConfigError(f"{key} must be {wanted}, got {value}")
    for key in NAMED_BY_USERS:
        entries = OmegaConf.select(settings, key) or {}
        for name, entry in [*entries.items()]:
            if entry is None:
                del entries[name]
            elif isinstance(entry, DictConfig) and entry.get("args", "") is None:
                del entry["args"]
    return settings
