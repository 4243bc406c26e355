"""Checks of values; every message names the key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

OWN_FUNCTION = re.compile(r"[\w.]+:\w+")  # module:function

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def require_function(
    key: str, value: str, *, form: str = "module:function", known: Sequence[str] = ()
) -> None:
    """Raise ValueError unless `value` names a user's function or is one of the `known`; the
    message proposes the name that a path or a dotted name may have meant.
    """
    if value in known or (OWN_FUNCTION.fullmatch(value) and ".py:" not in value):
        return
    module = re.sub(r"\.py(?=$|:)", "", value).removeprefix("./").replace("/", ".")
    module, _, name = module.replace(":", ".").rpartition(".")
    if OWN_FUNCTION.fullmatch(f"{module}:{name}") and not value.endswith(".py"):
        raise ValueError(f"{key} must be {form}, got {value}; did you mean {module}:{name}?")
    choices = f"{form} or one of {', '.join(known)}" if known else form
    # For example ppo for ppo_clip.
    longer = [name for name in known if name.startswith(f"{value}_")]
    near = longer or get_close_matches(value, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if not near and name.isidentifier():
        hint = f"; write {module}{'.' if module else ''}{name}:NAME for your own function"
    raise ValueError(f"{key} must be {choices}, got {value}{hint}")


def within(bounds: str, default: float | str | None) -> Any:  # noqa: ANN401 (the setting has it)
    """Return the field of a setting with the values that it takes: "> 0", ">= 1" or "in (0, 1]".
    With " or auto" at the end the word auto is accepted too, and null if the type allows it.
    """
    return field(default=default, metadata={"bounds": bounds})


def check_bounds(section: str, chosen: DataclassInstance) -> None:
    """Raise ValueError naming the first setting of `section` that is out of its bounds."""
    for entry in fields(chosen):
        bounds, value = entry.metadata.get("bounds"), getattr(chosen, entry.name)
        null = " or null" if str(entry.type).endswith("None") else ""
        require(
            bounds is None or value is None or _is_within(value, bounds),
            f"{section}.{entry.name} must be {bounds}{null}, got {value}",
        )


def _is_within(value: float | str, bounds: str) -> bool:
    interval, _, word = bounds.partition(" or ")
    if isinstance(value, str):
        return value == word
    match interval.split():
        case [">", low]:
            return value > float(low)
        case [">=", low]:
            return value >= float(low)
        case ["in", low, high]:
            lowest, highest = float(low[1:-1]), float(high[:-1])
            is_above = value >= lowest if low[0] == "[" else value > lowest
            return is_above and (value <= highest if high[-1] == "]" else value < highest)
    raise AssertionError(bounds)
