"""Settings that are given as Python values, written as on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

from april_rl.config.schema import TrainConfig
from april_rl.config.store import NAMED_BY_USERS, ConfigError
from april_rl.config.wrong_settings import unknown_setting

# Sections whose settings are overridden one by one, like the entries that a user names.
_SECTIONS = {
    field.name for field in fields(TrainConfig) if is_dataclass(field.default_factory)
} | NAMED_BY_USERS.keys()
_NEEDS_NO_QUOTES = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_/][\w./:-]*", re.IGNORECASE)


# Returns the text of a setting whose value is a function or a class, from its key and the value.
NameOf = Callable[[str, Callable[..., object]], str]


def as_overrides(settings: Mapping[str, object], name_of: NameOf | None = None) -> list[str]:
    """Return KEY=VALUE for each setting, nested or with dotted keys; raise ConfigError."""
    return list(_overrides(settings, "", name_of))


def _overrides(
    settings: Mapping[str, object], prefix: str, name_of: NameOf | None
) -> Iterator[str]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        is_known = key.partition(".")[0] in TrainConfig.__dataclass_fields__
        if not is_known and not isinstance(value, str | Real | None):
            raise ConfigError(
                "rows and functions are given as data, held_out, reward, tools and functions. "
                + unknown_setting(key, TrainConfig)
            )
        if isinstance(value, Mapping) and key in _SECTIONS:
            yield from _overrides(value, f"{key}.", name_of)
        else:
            yield f"{key}={_write_value(value, key, name_of)}"


def _write_value(value: object, key: str, name_of: NameOf | None) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Integral():
            return str(int(value))
        case Real():
            return repr(float(value))
        case Enum():
            return _write_value(value.value, key, name_of)
        case str() | Path():
            text = str(value)
            is_plain = _NEEDS_NO_QUOTES.fullmatch(text)
            return text if is_plain else QuotedString(text, Quote.single).with_quotes()
        case list() | tuple():
            return f"[{','.join(_write_value(each, key, name_of) for each in value)}]"
        case Mapping():
            pairs = (f"{name}: {_write_value(each, key, name_of)}" for name, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case Callable() if name_of is not None:
            return _write_value(name_of(key, value), key, None)
    raise ConfigError(
        f"{key} is a {type(value).__name__}; a setting is text, a number, True, False, None, or a "
        "list or dict of them"
    )
