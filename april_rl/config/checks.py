"""Checks of values; the message names the key."""

from __future__ import annotations


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
