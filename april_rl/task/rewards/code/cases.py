"""Cases: an input, and an expected output that stays outside the sandbox.

A `Case` is one run of a program; a `FunctionCall` is one call of a function in a response.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

TOLERANCE = 1e-6  # allowed error of decimal numbers, absolute or relative, whichever allows more
# Expected numbers have a point, or Python's form 1e-07; printed ones may also be whole.
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE][+-]))([eE][+-]?\d+)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

_CALLER = """
import json, os, sys
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the response itself prints is not a result
name, arguments = json.load(sys.stdin)
solution = sys.modules["solution"] = type(sys)("solution")
exec(compile({program!r}, "solution", "exec"), vars(solution))
found = getattr(solution, name, None) or getattr(solution.Solution(), name)
json.dump(found(*arguments), result, default=lambda value: value.tolist())  # numpy's
result.close()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of a program: its input and its expected output."""

    input: str
    output: str

    def is_met(self, printed: str) -> bool:
        """Return whether the output equals the expected one, ignoring white space at the end of
        lines. Where a decimal number is expected, a number within TOLERANCE equals it.
        """
        found, expected = _lines(printed), _lines(self.output)
        return len(found) == len(expected) and all(map(_is_same_line, found, expected))

    def __str__(self) -> str:
        return f"the case with input {self.input!r:.60}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One call of a function of the response: the call as JSON, and the values it may return."""

    input: str
    expected: tuple[object, ...]

    def is_met(self, printed: str) -> bool:
        """Return whether the value that came back as JSON equals an expected one."""
        try:
            returned = json.loads(printed)
        except (ValueError, RecursionError):
            return False
        return any(is_same_value(returned, value) for value in self.expected)

    def __str__(self) -> str:
        return f"the call {self.input:.60}"


def calling(program: str) -> str:
    """Return a program that reads the function's name and its arguments from its input as JSON,
    calls the function of `program`, or the method of its class Solution, and prints the result.
    """
    return _CALLER.format(program=program)


def is_same_value(found: object, expected: object) -> bool:
    """Return whether two values from JSON are equal, decimals within TOLERANCE; true is not 1."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        is_whole = isinstance(found, int) and isinstance(expected, int)
        return found == expected or (not is_whole and _is_close(found, expected))
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            is_same_value(found[key], value) for key, value in expected.items()
        )
    return found == expected


def _is_same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    words, expected_words = re.split(r"(\s+)", found), re.split(r"(\s+)", expected)
    return len(words) == len(expected_words) and all(map(_is_same_word, words, expected_words))


def _is_same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    are_numbers = _DECIMAL.fullmatch(expected) and _NUMBER.fullmatch(found)
    return bool(are_numbers) and _is_close(float(found), float(expected))


def _is_close(found: float, expected: float) -> bool:
    try:
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond the largest float
        return False


def _lines(text: str) -> list[str]:
    """Return the lines of an output without white space at their ends or empty last lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
