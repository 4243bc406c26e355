"""Cases: an input, and an expected output that stays outside the sandbox.

A `Case` runs a program, a `FunctionCall` calls a function, a `ValueCheck` compares for asserts.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from april_rl.jail.sandbox import Check

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

SEND = "_send_value"  # the function that sends a value with its number
# It has its own namespace: an honest response may give `list` another meaning. A response that
# replaces it can send another value, but does not know which one is expected.
_SENDER = """
import collections.abc, os
def plain(value):
    if value is None or isinstance(value, (bytes, complex)): return value
    if isinstance(value, str): return str.__str__(value)
    if isinstance(value, dict): return {plain(key): plain(each) for key, each in value.items()}
    for base, kind in ((list, list), (tuple, tuple), (collections.abc.Set, set)):
        if isinstance(value, base): return kind(map(plain, value))
    return next(kind(value) for kind in (int, float) if kind(value) == value)
def send(number, value): os.write(3, ascii((number, plain(value))).encode() + bytes([10]))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck(Check):
    """A test, and its source as it runs: asserts send what they compare with literals."""

    sends: str
    expected: Mapping[int, object]  # the literals, by the number with which a value is sent

    def is_met(self, report: str) -> bool:
        """Return whether every value was sent and equals its literal."""
        sent = dict(re.findall(r"^\((\d+), (.*)\)$", report, re.MULTILINE))
        with suppress(LookupError, ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return all(_is_text_of(sent[f"{n}"], v) for n, v in self.expected.items())
        return False


def _is_text_of(text: str, literal: object) -> bool:
    """Return whether a text that was sent is a value equal to a literal. Megabytes would take
    gigabytes to parse, so a text that is too long to be equal is not.
    """
    fits = len(text) <= 4 * len(ascii(literal)) + 400  # True for 1, and all digits of 1e300
    return fits and bool(ast.literal_eval(text) == literal)


def sending(program: str) -> str:
    """Return a program that runs `program` in its own namespace, where values can be sent."""
    sender = f"exec({_SENDER!r}, _sender := {{}}); {SEND} = _sender['send']"
    return f'{sender}; exec(compile({program!r}, "solution", "exec"), globals())'


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
    return [line.rstrip() for line in text.rstrip().splitlines()]
