"""The tests of a coding task, as data sets publish them: Python asserts, or inputs and outputs."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from april_rl.rewards.code.sandbox import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of a program: its input and its expected output."""

    input: str
    output: str

    def is_met(self, printed: str) -> bool:
        """Return whether the output equals the expected one, ignoring white space at the end of
        lines.
        """
        return _lines(printed) == _lines(self.output)


def read_tests(tests: object) -> list[Check] | list[Case]:
    """Return the tests in a row's column.

    The column holds Python source; a list of sources, each one test; a list of mappings with
    `input` and `output`; or one of these lists as JSON text. Raise ValueError when it holds none of
    these, no test, or source that Python cannot parse.
    """
    listed = _from_json(tests) if isinstance(tests, str) else tests
    if isinstance(listed, str):
        found: list[Check] | list[Case] = _split(listed)
    elif isinstance(listed, Sequence) and all(isinstance(item, str) for item in listed):
        found = [Check(source=ast.unparse(_parsed(item))) for item in listed]
    elif isinstance(listed, Sequence) and all(isinstance(item, Mapping) for item in listed):
        found = [_case(item) for item in listed]
    else:
        raise ValueError(
            f"the tests of a task must be Python source or a list of {{input, output}}, got "
            f"{tests!r:.80}"
        )
    if not found:
        raise ValueError(f"a task has no tests: {tests!r:.80}")
    return found


def _split(source: str) -> list[Check]:
    """Return the tests of one source: its statements with an assert, and its functions `test_...`.

    Everything else runs between them, in order, and does not count. A source without any is one
    test as a whole.
    """
    checks = [_check(statement) for statement in _parsed(source).body]
    return checks if any(check.counts for check in checks) else [Check(source=source)]


def _check(statement: ast.stmt) -> Check:
    """Return one statement of a source, followed by a call if it defines a test."""
    source = ast.unparse(statement)
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return Check(
            source=source, counts=any(isinstance(n, ast.Assert) for n in ast.walk(statement))
        )
    if not (isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_")):
        return Check(source=source, counts=False)
    if len(statement.args.args) > len(statement.args.defaults):
        raise ValueError(
            f"the test function {statement.name} takes arguments; fixtures of pytest are not known"
        )
    return Check(source=f"{source}\n{statement.name}()")


def _parsed(source: str) -> ast.Module:
    """Return the parsed source; raise ValueError when it is invalid or empty."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests of a task are not Python: {error}: {source!r:.80}") from error
    if not module.body:
        raise ValueError(f"the tests of a task hold no statement: {source!r:.80}")
    return module


def _case(item: Mapping[str, object]) -> Case:
    """Return one case."""
    if not {"input", "output"} <= item.keys():
        raise ValueError(f"a test case must have input and output, got {dict(item)!r:.80}")
    return Case(input=_joined(item["input"]), output=_joined(item["output"]))


def _joined(text: object) -> str:
    """Return a text; a list of lines becomes one text."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _from_json(text: str) -> object:
    """Return the list if the text is one in JSON, else the text."""
    try:
        listed = json.loads(text)
    except json.JSONDecodeError:
        return text
    return listed if isinstance(listed, list) else text


def _lines(text: str) -> list[str]:
    """Return the lines of an output, without white space at their ends and without empty last
    lines.
    """
    return [line.rstrip() for line in text.rstrip().splitlines()]
