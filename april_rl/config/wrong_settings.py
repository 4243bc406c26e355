"""Plain messages for settings that Hydra and OmegaConf refuse: key, values, nearest name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from april_rl.config.other_trainers import is_name, translate_name

_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}
_HELP = "python -m april_rl.train --cfg job prints every setting"
LIST_OF_RECIPES = "python -m april_rl.train --help lists all recipes"

# Common names for settings that are too far from ours to be found by spelling.
_MEANT = {
    "algorithm.mask_high": "algorithm.weight_bounds",
    "algorithm.mask_low": "algorithm.weight_bounds",
    "algorithm.tis_cap": "algorithm.weight_bounds",
    "checkpoint.keep_best": "checkpoint.best_metric",
    "engine.async_scheduling": "engine.args",
    "engine.max_batched_tokens": "engine.args",
    "engine.speculation": "engine.args",
    "environment.start_timeout_s": "user_code.start_timeout_s",
    "reward.start_timeout_s": "user_code.start_timeout_s",
    "environment.agent": "environment.function",
    "evaluation.function": "reward.functions",
    "evaluation.k": "evaluation.num_samples",
    "k": "evaluation.num_samples",
    "epochs": "trainer.num_steps",
    "steps": "trainer.num_steps",
}
_OWN_RECIPE = "your own recipe is FOLDER/recipe/NAME.yaml: write --config-dir FOLDER +recipe=NAME"


def explain(
    error: Exception,
    *,
    schema: type,
    overrides: Sequence[str],
    recipes: Iterable[str],
) -> str:
    """Explain what is wrong with a setting and which values it takes. `schema` is the dataclass
    of all settings, `overrides` are the words of the command line, and `recipes` the names of
    all recipes.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        wrong = _no_such_choice(str(error.missing_cfg_file), error.options or (), recipes)
        return _of_file(error) + wrong
    if isinstance(error, OverrideParseException):
        given = error.override.removeprefix("++")  # `as_hydra_takes` adds them
        if given in recipes:
            return f"{given} is a recipe: write +recipe={given}"
        return _split_by_shell(given, overrides) or _unreadable(given, schema)
    cause = next((one for one in _chain(error) if isinstance(one, OmegaConfBaseException)), None)
    if cause is None or not cause.full_key:
        return _refused_override(error, schema)
    return _of_file(error) + _wrong_setting(cause, schema, overrides)


def _wrong_setting(error: OmegaConfBaseException, schema: type, overrides: Sequence[str]) -> str:
    key = str(error.full_key)
    given = _override_of(key, overrides)
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        return f"{key} refers to {_missing_name(_first_line(error))}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return unknown_setting(given.partition("=")[0].lstrip("+~") or key, schema)
    line = _first_line(error)
    _, _, value = given.partition("=") if given else line.rpartition("value: ")
    if error_key := re.search(r"\[(\d+)\]$", key):  # it is an entry of a list
        value = value.strip("[]").split(",")[int(error_key[1])].strip()
    if named := re.match(r"Value '(.*)' of type '", line):
        value = value if given else named[1]
    got = f", got {value}" if given or value != line else f" ({line})"
    return f"{key} must be {expected_value(key, schema)}{got}"


def _missing_name(line: str) -> str:
    """Return the missing name in a reference ${...}, read from the error of OmegaConf."""
    if name := re.match(r"Interpolation key '(.*)' not found", line):
        return f"{name[1]}, which is not a setting"
    if name := re.search(r"Environment variable '(.*)' not found", line):
        return f"the environment variable {name[1]}, which is not set"
    return (
        "what cannot be read: write ${NAME} for a setting, ${oc.env:NAME} for an environment "
        "variable"
    )


def _of_file(error: Exception) -> str:
    """Return the recipe or the group of settings that contains the error."""
    file, is_named, _ = str(error).removeprefix("In '").partition("': ")
    return f"{file}: " if is_named and str(error).startswith("In '") and file != "train" else ""


def unknown_setting(key: str, schema: type) -> str:
    """Return a message that `key` is not a setting, with the settings that it may mean."""
    if (meant := _MEANT.get(key)) is not None:
        return f"{key} is not a setting; did you mean {meant}?"
    known = list(keys(schema))
    section, _, name = key.rpartition(".")
    kind = _type_of(section, schema)
    beside = [one.name for one in fields(kind)] if is_dataclass(kind) else []
    near = [] if is_name(key) else get_close_matches(name, beside, n=2, cutoff=0.75)
    if not near and not is_name(key):  # trainer.steps is trainer.num_steps
        near = sorted((one for one in beside if one.endswith(f"_{name}")), key=len)[:1]
    likely = [f"{section}.{one}".lstrip(".") for one in near]
    if not is_name(key):
        likely = likely or [one for one in known if one.endswith(f".{name}")]
    if not likely and (here := translate_name(key)):
        return f"{key} is not a setting; {here}"
    likely = likely or [f"{section}.{one}" for one in get_close_matches(name, beside, n=1)]
    if not likely and section and beside:
        return f"{key} is not a setting; {section} has {', '.join(beside)}"
    likely = likely or get_close_matches(key, known, n=2)
    hint = f"did you mean {' or '.join(likely)}?" if likely else _HELP
    return f"{key} is not a setting; {hint}"


def wrong_section(given: Mapping[Any, object], schema: type, *, section: str = "") -> str:
    """Return which key of a file has a value in place of a section, or the reverse; or ''."""
    for name, value in given.items():
        key = f"{section}.{name}".lstrip(".")
        kind = _type_of(key, schema)
        if value is None or kind in (None, Any) or str(value).startswith("${"):
            continue
        kinds = (kind,) if get_origin(kind) is dict else (get_args(kind) or (kind,))
        is_section = any(is_dataclass(each) or get_origin(each) is dict for each in kinds)
        if isinstance(value, dict) != is_section:
            return f"{key} must be {expected_value(key, schema)}, got {value}"
        if isinstance(value, dict) and (wrong := wrong_section(value, schema, section=key)):
            return wrong
    return ""


def wrong_option(
    word: str, words: Sequence[str], schema: type, *, own: Collection[str] = ()
) -> str:
    """Return what to write in place of `word`, which begins with dashes and is not an option. A
    command takes its `own` arguments NAME=VALUE in addition to the settings.
    """
    option, has_value, value = word.partition("=")
    key = option.lstrip("-").replace("-", "_")
    behind = words[words.index(word) + 1 :]
    if not has_value:
        value = behind[0] if behind and "=" not in behind[0] else ""
    if key in ("config", "config_path", "cp", "config_name", "cn") or is_yaml(value):
        return f"{option} is not an option: {_OWN_RECIPE}"
    if key == "recipe":
        return f"{option} is not an option: write +recipe={value or 'NAME'}"
    if key not in (*own, *keys(schema)):
        hint = unknown_setting(key, schema)
        return f"{option} is not an option. Settings are written KEY=VALUE, and {hint}"
    return f"{option} is not an option: write {key}={value or 'VALUE'}"


def is_yaml(word: str) -> bool:
    return PurePosixPath(word).suffix in (".yaml", ".yml")


def expected_value(key: str, schema: type) -> str:
    """Describe the values that the setting `key` takes."""
    kind = _type_of(key, schema)
    is_entry = key.endswith("]") and get_origin(kind) is list
    return _in_words(get_args(kind)[0] if is_entry else kind, key)


def _type_of(key: str, schema: type) -> object:
    """Return the type of a section or setting, `schema` itself for the empty key."""
    kind: Any = schema
    for part in filter(None, key.partition("[")[0].split(".")):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        kind = hints.get(part, get_args(kind)[1] if get_origin(kind) is dict else None)
    return kind


def _in_words(kind: object, key: str) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(str(choice.value) for choice in kind)
    if is_dataclass(kind):
        return f"a section: set {', '.join(f'{key}.{one.name}' for one in fields(kind)[:3])}, ..."
    if get_origin(kind) in (Union, UnionType):
        kinds = get_args(kind)
        # The setting takes a number or the word auto.
        is_auto = str in kinds and kinds != (str, NoneType)
        named = [_in_words(one, key) for one in kinds if not (is_auto and one is str)]
        return " or ".join([*named, *(["auto"] if is_auto else [])]).replace("null or null", "null")
    if get_origin(kind) is list:
        return f"a list in brackets, each entry {_in_words(get_args(kind)[0], key)}"
    return (
        "a mapping such as {name: value}, or null" if get_origin(kind) is dict else "another value"
    )


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the key of every section and setting."""
    for name, kind in get_type_hints(schema).items():
        yield prefix + name
        if is_dataclass(kind):
            yield from keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]


def _no_such_choice(path: str, options: Iterable[str], recipes: Iterable[str]) -> str:
    is_recipe = path.startswith("recipe/")
    group, _, name = path.partition("/") if is_recipe else path.rpartition("/")
    known = sorted(recipes if is_recipe else options)
    near = get_close_matches(name, known, n=1)
    near = near or [one for one in known if PurePosixPath(one).name == name]
    hint = f"did you mean {near[0]}? " if near else ""
    if is_recipe and is_yaml(name):
        return f"there is no {group} {name}; {_OWN_RECIPE}"
    others = f"{LIST_OF_RECIPES}; your own recipe needs --config-dir FOLDER"
    others = others if is_recipe else f"Known: {', '.join(known)}"
    return f"there is no {group} {name}; {hint}{others}"


def _split_by_shell(override: str, words: Sequence[str]) -> str:
    """Return how to write an override whose braces or brackets close in a later word; empty if
    they do not.
    """
    bare = [word.lstrip("+") for word in words]
    start = bare.index(override.lstrip("+")) if override.lstrip("+") in bare else len(bare)
    if _is_closed(override):
        return ""
    longer = (" ".join(words[start:end]) for end in range(start + 2, len(words) + 1))
    whole = next((one for one in longer if _is_closed(one)), "")
    advice = f"the shell has split {override} at the space; put the whole word into quotes"
    return f"{advice}: '{whole}'" if whole else ""


def _is_closed(override: str) -> bool:
    return all(override.count(one) == override.count(other) for one, other in ("{}", "[]"))


def _unreadable(override: str, schema: type) -> str:
    """Return how to write an override that cannot be parsed."""
    key, has_value, value = override.partition("=")
    name = key.lstrip("+~")
    if not has_value and name in keys(schema):
        return f"{name} has no value: write {name}=VALUE"
    if not has_value:
        return f"{override} is not key=value; {_settings_for_path(override) or _HELP}"
    if name not in keys(schema) and "." in name and not name.startswith("hydra."):
        return unknown_setting(name, schema)
    escaped = value.replace('"', r"\"")
    return (
        f"the value of {key} cannot be read: {value}. Put it into two kinds of quotes, "
        f"'{key}=\"{escaped}\"'"
    )


def _settings_for_path(word: str) -> str:
    """Return the settings that the path of a file or folder may be meant for."""
    path = Path(word)
    if is_yaml(word):
        return _OWN_RECIPE
    if path.is_dir():
        return f"a model is named by model.path={word}"
    return f"data is named by data.path={word}" if path.is_file() else ""


def _refused_override(error: Exception, schema: type) -> str:
    """Return, in one line, an error in which Hydra does not name the key."""
    line = _first_line(error)
    if line.startswith("Ambiguous value for argument"):
        return f"{line.split(chr(39))[1]} has several values: add --multirun, or [a,b] for a list"
    if multiple := re.match(r"Multiple values for (\w+)\..*'override \w+: (.*)'", line):
        return f"{multiple[1]}={multiple[2]} is a second {multiple[1]}; a command takes one"
    if slash := re.match(r"In '.*': Could not override '.*/(.*)@.*", line):
        return f"{_of_file(error)}write `override /{slash[1]}: NAME`, with the slash"
    if line.startswith("Could not delete from config"):
        return f"~{line.split(chr(39))[1]} removes nothing; {_HELP}"
    if line.startswith("Could not override") and "." in line.split("'")[1]:
        return unknown_setting(line.split("'")[1], schema)
    return line


def _override_of(full_key: str, overrides: Sequence[str]) -> str:
    """Return the last override that sets `full_key`, or else the last one below it."""
    plain = full_key.partition("[")[0]
    keys = {override.partition("=")[0].lstrip("+~"): override for override in overrides}
    below = [override for key, override in keys.items() if key.startswith(f"{plain}.")]
    return keys.get(plain) or (below[-1] if below else "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
