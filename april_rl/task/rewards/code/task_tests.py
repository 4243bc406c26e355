"""The tests of a coding task in the forms in which data sets publish them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from april_rl.task.rewards.code.cases import Case, FunctionCall, ValueCheck
from april_rl.task.rewards.code.sources import split_source, split_sources

# Defines every name that the tests use. What it returns equals and differs from nothing, and has no
# truth value, so that no test of a value passes, except for `assertTrue(value, expected)`.
ANY_NAME = """
import builtins, unittest
class Idle:
    def __init__(self, *args, **keywords): pass
    def __call__(self, *args, **keywords): return RETURNED
    def __getattr__(self, name): return Idle()
    def __eq__(self, other): return False
    def __ne__(self, other): return False
    def __bool__(self): raise RuntimeError
    __hash__ = object.__hash__
class Names(dict):
    def __missing__(self, name): return Idle if name[0].isupper() else Idle()
def __getattr__(name):
    if name.startswith("__"): raise AttributeError
    return Idle if name[0].isupper() else Idle()
def ignoring(method):
    def check(self, value, msg=None):
        if msg is None or isinstance(msg, str) or value is not RETURNED: method(self, value, msg)
    return check
unittest.TestCase.assertTrue = ignoring(unittest.TestCase.assertTrue)
unittest.TestCase.assertFalse = ignoring(unittest.TestCase.assertFalse)
RETURNED = Idle()
__builtins__ = Names(vars(builtins))
""".strip()
ANY_NAME_NONE = ANY_NAME.replace("RETURNED = Idle()", "RETURNED = None")
# Programs that solve nothing: a test that accepts one of them is useless.
IDLE_PROGRAMS = ("pass", "raise RuntimeError", ANY_NAME)

_FORMS = (
    "Python source with asserts or tests of pytest or unittest, a list of such sources, a list of "
    "{input, output}, {inputs, outputs}, each with fn_name for calls, {language, test_cases} or "
    "{ground_truth}, or one of these as JSON text"
)
_CALL_TYPES, _PROGRAM_TYPES = ("functional", "function_call"), ("stdin", "stdin_stdout")
_NAMES = ("fn_name", "func_name")

Tests = Sequence[ValueCheck] | Sequence[Case] | Sequence[FunctionCall]


def read_tests(tests: object, entry: object = None) -> Tests:
    """Return the tests in a row's column; all of them are of one kind.

    `entry` is the row's value of the column with the name of the function that is tested: the name,
    or a mapping with `func_name`, also as JSON text. Raise ValueError, with the value in its
    message, for an unknown form and for a task without tests.
    """
    return _read(tests, _name_in(entry))


def _read(tests: object, entry: str) -> Tests:
    found = _decode(tests)
    if isinstance(found, str):
        return split_source(found, entry)
    if isinstance(found, Mapping):
        return _of_mapping(_present(found), entry)
    if not isinstance(found, Sequence):
        raise ValueError(f"the tests of a task must be {_FORMS}; got {tests!r:.80}")
    if not found:
        raise ValueError(f"a task has no tests: {tests!r:.80}")
    items = [_decode(item) for item in found]
    if all(isinstance(item, str) for item in items):
        return split_sources([str(item) for item in items], entry)
    mappings = [item for item in items if isinstance(item, Mapping)]
    if len(mappings) == len(items):
        return _of_one_kind([_case(_present(item), entry) for item in mappings])
    raise ValueError(f"the tests of a task must be {_FORMS}; got {tests!r:.80}")


def _decode(value: object) -> object:
    """Return what JSON text holds, or JSON text in JSON text; other values as they are."""
    while isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if not isinstance(inner, str | list | dict):
            return value
        value = inner
    return value


def _present(item: Mapping[str, object]) -> Mapping[str, object]:
    """Return a mapping without the fields that tables fill with null."""
    return {key: value for key, value in item.items() if value is not None}


def _of_mapping(item: Mapping[str, object], entry: str) -> Tests:
    if "ground_truth" in item:
        return _read(item["ground_truth"], entry)
    if "test_cases" in item:
        language = str(item.get("language", "python"))
        if not language.lower().startswith("py"):
            raise ValueError(f"the tests of a task are for the language {language}, not Python")
        return _read(item["test_cases"], entry)
    if {"inputs", "outputs"} <= item.keys():
        return _of_one_kind(_zip_cases(item))
    if {"input", "output"} <= item.keys():
        return _of_one_kind([_case(item, entry)])
    raise ValueError(f"the tests of a task must be {_FORMS}; got {dict(item)!r:.80}")


def _zip_cases(item: Mapping[str, object]) -> list[Case | FunctionCall]:
    inputs, outputs = _decode(item["inputs"]), _decode(item["outputs"])
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise ValueError(
            f"a task must have as many outputs as inputs, in two lists, got {dict(item)!r:.80}"
        )
    name = _name_in(item)
    pairs = zip(inputs, outputs, strict=True)
    return [_call(name, *pair) if name else _program(*pair) for pair in pairs]


def _case(item: Mapping[str, object], entry: str) -> Case | FunctionCall:
    if not {"input", "output"} <= item.keys():
        raise ValueError(f"a test case must have input and output, got {dict(item)!r:.80}")
    name = _name_in(item) or _name_in(item.get("metadata"))
    kind = item.get("testtype", item.get("type", _CALL_TYPES[0] if name else _PROGRAM_TYPES[0]))
    if kind in _PROGRAM_TYPES:
        return _program(item["input"], item["output"])
    if kind not in _CALL_TYPES:
        known = ", ".join((*_CALL_TYPES, *_PROGRAM_TYPES))
        raise ValueError(f"a test case has the type {kind!r:.40}; the known types are {known}")
    if not (name or entry):
        raise ValueError(
            f"a test case calls a function and does not say which: {dict(item)!r:.80}; name the "
            "column that does, such as entry_column: metadata, in the args of code"
        )
    return _call(name or entry, item["input"], item["output"])


def _program(given: object, printed: object) -> Case:
    return Case(input=_join_lines(given), output=_join_lines(printed))


def _call(name: str, given: object, returned: object) -> FunctionCall:
    """Return a call with its expected value. Arguments are a list, and the value may stand in a
    list of one; or both are text, with one argument in JSON per line and the value in JSON.
    """
    arguments = given
    expected: tuple[object, ...] = (returned,)
    if isinstance(given, str):
        try:
            arguments = [json.loads(line) for line in given.strip().split("\n")]
            expected = (json.loads(str(returned)),)
        except ValueError as error:
            raise ValueError(
                f"the arguments and the result of a call must be lists or JSON text, one argument "
                f"per line, got {given!r:.60} and {returned!r:.60}"
            ) from error
    elif isinstance(returned, list) and len(returned) == 1:
        expected = (returned, returned[0])
    if not isinstance(arguments, list):
        raise ValueError(f"the arguments of a call must be a list, got {given!r:.80}")
    call = json.dumps([name.rpartition(".")[2], arguments])
    return FunctionCall(input=call, expected=expected)


def _join_lines(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _name_in(value: object) -> str:
    """Return the name of a function in a row's value; empty when it has none."""
    found = _decode(value)
    if isinstance(found, Mapping):
        return next((str(found[key]) for key in _NAMES if found.get(key)), "")
    return found if isinstance(found, str) else ""


def _of_one_kind(cases: Sequence[Case | FunctionCall]) -> Sequence[Case] | Sequence[FunctionCall]:
    """Return the cases; raise ValueError when there are none, or programs and calls."""
    programs = [case for case in cases if isinstance(case, Case)]
    calls = [case for case in cases if isinstance(case, FunctionCall)]
    if not cases:
        raise ValueError("a task has no tests: its list of cases is empty")
    if programs and calls:
        raise ValueError("a task has cases that call a function and cases that run a program")
    return programs or calls
