"""Checks of values; every message names the key."""

from __future__ import annotations

import math
from collections.abc import Iterable


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def at_least(section: str, minimum: float, **values: float | None) -> None:
    """Raise ValueError naming `section.key` for the first value below `minimum`; None passes."""
    for key, value in values.items():
        require(
            value is None or value >= minimum, f"{section}.{key} must be >= {minimum}, got {value}"
        )


def above(section: str, bound: float, **values: float | None) -> None:
    """Raise ValueError naming `section.key` for the first value not above `bound`; None passes."""
    for key, value in values.items():
        require(value is None or value > bound, f"{section}.{key} must be > {bound}, got {value}")


def finite(values: Iterable[tuple[str, object]]) -> None:
    """Raise ValueError naming the first key whose value is infinite or not a number."""
    for key, value in values:
        require(
            not isinstance(value, float) or math.isfinite(value),
            f"{key} must be a finite number, got {value}",
        )
