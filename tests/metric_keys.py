"""Comparison of a set of logged metrics with the table of `april_rl.run.tracking.keys`."""

import re
from collections.abc import Iterable

from april_rl.run.tracking.keys import FROZEN_KEYS, KEYS, Key


def describe(key: str) -> Key | None:
    """Return the line of the table that describes the logged `key`; None when there is none."""
    exact = (known for known in KEYS if known.key == key)
    return next(exact, next((known for known in KEYS if matches(known.key, key)), None))


def undescribed_keys(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key != "step" and describe(key) is None]


def missing(keys: Iterable[str]) -> list[str]:
    """Return the frozen keys that no key in `keys` matches."""
    present = tuple(keys)
    return [frozen for frozen in FROZEN_KEYS if not any(matches(frozen, key) for key in present)]


def matches(pattern: str, key: str) -> bool:
    """Return whether `key` fits `pattern`, in which `*` stands for any text without a slash."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^/]+"), key) is not None
