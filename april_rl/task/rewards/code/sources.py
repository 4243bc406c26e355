"""Tests that are Python source: what in it is a test, and how it is run.

A test is a statement that asserts or raises, itself or in functions of the source that it calls; a
function or method whose name begins with `test`; and `check(candidate)`. Everything else is set-up.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from april_rl.task.rewards.code.cases import SEND, ValueCheck

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_TestClass = tuple[ast.ClassDef, bool]  # the class, and whether it belongs to unittest
_TEST_NAME = re.compile(r"(run_?)?(all_?)?test", re.IGNORECASE)
# Calls of these are skipped; the tests that they would run are run here.
_RUNNERS = {"unittest.main", "pytest.main"}


def split_source(source: str, entry: str = "") -> list[ValueCheck]:
    """Return the tests of one source, each with what it needs: its statements in order, then a call
    of each test function and method that they do not call themselves.

    `entry` is what `check(candidate)` gets. Raise ValueError when nothing is a test, and for source
    that is invalid or needs fixtures.
    """
    module = _Source(source)
    tests = [(ast.Module([each], []), module.counts(each)) for each in module.statements]
    return _checks([*tests, *((ast.parse(call), True) for call in module.calls(entry))], source)


def split_sources(sources: Sequence[str], entry: str = "") -> list[ValueCheck]:
    """Return one test for each source; a source that asserts nothing is set-up for the later ones.
    Raise ValueError when none is a test, and in the cases of `split_source`.
    """
    tests = []
    for source in sources:
        module = _Source(source)
        calls = ast.parse("\n".join(module.calls(entry))).body
        counts = bool(calls) or any(map(module.counts, module.statements))
        tests.append((ast.Module([*module.statements, *calls], []), counts))
    return _checks(tests, sources)


def _checks(tests: Sequence[tuple[ast.Module, bool]], source: object) -> list[ValueCheck]:
    """Return a check for each test, given as its code and whether it counts."""
    if not any(counts for _, counts in tests):
        raise ValueError(f"the tests of a task have no assert that runs: {source!r:.80}")
    checks, numbers = [], itertools.count()
    for test, counts in tests:
        text, expected = ast.unparse(test), dict(_take_literals(test.body, numbers))
        sends = ast.unparse(test)
        checks.append(ValueCheck(source=text, counts=counts, sends=sends, expected=expected))
    return checks


def _take_literals(body: list[ast.stmt], numbers: Iterator[int]) -> Iterator[tuple[int, object]]:
    """Have asserts send what they compare with a literal; yield the number of each, and it."""
    for place, node in enumerate(body):
        if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)):
            continue
        is_equation = [*map(type, node.test.ops)] == [ast.Eq]
        sides = [node.test.left, *node.test.comparators] if is_equation else []
        for value, literal in itertools.permutations(sides, 2):
            with suppress(ValueError, TypeError, RecursionError):
                yield (number := next(numbers)), ast.literal_eval(literal)
                body[place] = ast.parse(f"{SEND}({number}, {ast.unparse(value)})").body[0]
                break


class _Source:
    """A parsed source: its statements, and the tests that they do not call."""

    def __init__(self, source: str) -> None:
        body = _parse(source).body
        self._functions = {node.name: node for node in body if isinstance(node, _Function)}
        self._classes = [*_test_classes(body)]
        self._tests = [
            function
            for name, function in self._functions.items()
            if _TEST_NAME.match(name) and not _required_arguments(function)
        ]
        has_tests = self._tests or self._classes
        statements = body if has_tests else [*_without_guards(body)]
        self.statements = [
            node
            for node in statements
            if not (isinstance(node, ast.If) and _is_guard(node)) and not _is_runner(node)
        ]

    def counts(self, statement: ast.stmt) -> bool:
        """Return whether a statement can fail because of what it asserts."""
        if isinstance(statement, _Function | ast.ClassDef):
            return False
        functions = [self._functions[name] for name in self._reach(statement)]
        return any(_asserts(node) for node in (statement, *functions))

    def calls(self, entry: str) -> Iterator[str]:
        """Yield a call of each test that the statements do not call, in order."""
        running = [s for s in self.statements if not isinstance(s, _Function | ast.ClassDef)]
        has_run = {name for statement in running for name in self._reach(statement)}
        names = {test.name for test in self._tests}
        for test in self._tests:
            is_only_runner = self._reach(test) & (names - {test.name}) and not _asserts(test)
            if test.name not in has_run and not is_only_runner:
                yield _call_of(test, test.name)
        for node, is_unittest in self._classes:
            yield from _method_calls(node, is_unittest=is_unittest)
        everywhere = {
            name
            for node in (*running, *self._functions.values(), *(c for c, _ in self._classes))
            for name in _called_names(node)
        }
        for name, function in self._functions.items():
            if name in everywhere or not _required_arguments(function):
                continue
            if _takes_candidate(function):
                yield f"{name}({_checked_entry(entry, name)})"
            elif _TEST_NAME.match(name):
                raise ValueError(_unknown_arguments(name))

    def _reach(self, node: ast.AST) -> set[str]:
        found, waiting = set[str](), [node]
        while waiting:
            for name in _called_names(waiting.pop()) & self._functions.keys() - found:
                found.add(name)
                waiting.append(self._functions[name])
        return found


def _parse(source: str) -> ast.Module:
    """Return the parsed source; raise ValueError when it is invalid, empty or needs fixtures."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests of a task are not Python: {error}: {source!r:.80}") from error
    if not module.body:
        raise ValueError(f"a task's tests contain no statement: {source!r:.80}")
    for node in ast.walk(module):
        if isinstance(node, _Function):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if "autouse" in decorators or "parametrize" in decorators:
                raise ValueError(_unknown_arguments(node.name))
    return module


def _unknown_arguments(name: str) -> str:
    return f"the test function {name} needs arguments; fixtures and parameters are not known"


def _asserts(node: ast.AST) -> bool:
    """Return whether code in a node can fail by an assert, a raise or a call like assertEqual."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assert | ast.Raise):
            return True
        name = ast.unparse(part.func).rpartition(".")[2] if isinstance(part, ast.Call) else ""
        if name.startswith("assert") or name == "raises":
            return True
    return False


def _called_names(node: ast.AST) -> set[str]:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _required_arguments(function: _Function, *, given: int = 0) -> list[str]:
    arguments = function.args
    by_place = [*arguments.posonlyargs, *arguments.args]
    by_place = by_place[given : len(by_place) - len(arguments.defaults)]
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [a.arg for a in (*by_place, *(a for a, default in by_name if default is None))]


def _takes_candidate(function: _Function) -> bool:
    required = _required_arguments(function)
    return len(required) == 1 and (function.name == "check" or required == ["candidate"])


def _checked_entry(entry: str, name: str) -> str:
    if not entry:
        raise ValueError(
            f"the tests define {name}(candidate) and do not call it: name the column with the "
            "function's name, such as entry_column: entry_point, in the args of code"
        )
    try:
        return ast.unparse(ast.parse(entry, mode="eval"))
    except SyntaxError as error:
        raise ValueError(f"the entry point {entry!r:.80} is not a name in Python") from error


def _is_guard(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _without_guards(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, including the ones in `if __name__ == "__main__":`."""
    for node in body:
        yield from node.body if isinstance(node, ast.If) and _is_guard(node) else (node,)


def _is_runner(node: ast.stmt) -> bool:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return isinstance(node, ast.Expr) and any(ast.unparse(call) in _RUNNERS for call in calls)


def _test_classes(body: Iterable[ast.stmt]) -> Iterator[_TestClass]:
    """Yield each class with tests, and whether it belongs to unittest."""
    known = set[str]()
    for node in body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        is_unittest = any(base.endswith("TestCase") or base in known for base in bases)
        if is_unittest:
            known.add(node.name)
        if is_unittest or node.name.startswith("Test"):
            yield node, is_unittest


def _method_calls(node: ast.ClassDef, *, is_unittest: bool) -> Iterator[str]:
    methods = {method.name: method for method in node.body if isinstance(method, _Function)}
    for name, method in methods.items():
        if not name.startswith("test"):
            continue
        if is_unittest:
            yield f"{node.name}.setUpClass()\n{node.name}({name!r}).debug()"
            continue
        is_static = any(ast.unparse(each) == "staticmethod" for each in method.decorator_list)
        if _required_arguments(method, given=0 if is_static else 1):
            raise ValueError(_unknown_arguments(f"{node.name}.{name}"))
        lines = [f"_test = {node.name}()"]
        for before in ("setup_class", "setup_method"):
            if before in methods:
                given = f"_test.{name}" if _required_arguments(methods[before], given=1) else ""
                lines.append(f"_test.{before}({given})")
        yield "\n".join([*lines, _call_of(method, f"_test.{name}")])


def _call_of(function: _Function, name: str) -> str:
    if isinstance(function, ast.AsyncFunctionDef):
        return f"__import__('asyncio').run({name}())"
    return f"{name}()"
