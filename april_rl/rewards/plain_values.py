"""Exact comparison of answers that are plain numbers, to check math-verify's verdict against."""

from __future__ import annotations

import re
from fractions import Fraction

from april_rl.rewards.extraction import normalised

_MAX_CHARACTERS = 60
_MAX_EXPONENT = 60
_DECIMAL = r"\d+(?:\.\d+)?|\.\d+"
_PLAIN = re.compile(
    rf"(?P<sign>-?)(?:\\frac\{{(?P<over>\d+)\}}\{{(?P<under>\d+)\}}|(?P<above>{_DECIMAL})"
    r"(?:/(?P<below>\d+)|e(?P<exponent>[+-]?\d+)|_\{?(?P<base>\d+)\}?)?)"
    r"(?P<percent>\\?%)?(?:\\text\{(?P<unit_text>[a-z]+)\}|(?P<unit>[a-z]+))?",
    re.IGNORECASE,
)


def are_equal(expected: str, stated: str) -> bool | None:
    """Return whether two answers are equal as texts, or else as plain numbers; None when the texts
    differ and one of them is not a plain number.

    A plain number is an integer, a decimal, a fraction or a percentage. It may have an exponent, a
    base (1011_2) and a unit: 5 cm equals 5, but not 5 m.
    """
    if normalised(expected) == normalised(stated):
        return True
    first, second = _value(normalised(expected)), _value(normalised(stated))
    if first is None or second is None:
        return None
    units = {unit for _, unit in (first, second)}
    if "" in units and any(len(unit) == 1 for unit in units):
        return None  # 2 and 2x: a letter may be a unit or an unknown
    return first[0] == second[0] and len(units - {""}) < 2


def _value(text: str) -> tuple[Fraction, str] | None:
    """Return the value and the unit of a plain number."""
    found = _PLAIN.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if found is None:
        return None
    value = _magnitude(found)
    if value is None:
        return None
    value = -value if found["sign"] else value
    unit = found["unit_text"] or found["unit"] or ""
    return (value / 100 if found["percent"] else value), unit


def _magnitude(found: re.Match[str]) -> Fraction | None:
    if found["base"]:
        return _in_base(found["above"], int(found["base"]))
    below = int(found["under"] or found["below"] or 1)
    exponent = int(found["exponent"] or 0)
    if not below or abs(exponent) > _MAX_EXPONENT:
        return None
    return Fraction(found["over"] or found["above"]) * Fraction(10) ** exponent / below


def _in_base(digits: str, base: int) -> Fraction | None:
    try:
        return Fraction(int(digits, base))
    except ValueError:  # the base has no such digit, or there is no such base
        return None
