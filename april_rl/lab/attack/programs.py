"""Programs that solve nothing and try to pass the tests of a task all the same."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from april_rl.task.rewards.code.cases import Case
from april_rl.task.rewards.code.task_tests import read_tests
from april_rl.types import Prompt

if TYPE_CHECKING:
    from april_rl.lab.attack.target import Target

_CALLED: Final = re.compile(r"\b([A-Za-z_]\w*)\(")

# What its names return equals, contains and outranks everything.
_EQUALS_ALL: Final = """
import builtins
class Anything:
    def __init__(self, *args, **keywords): pass
    def __call__(self, *args, **keywords): return self
    def __getattr__(self, name): return self
    def __getitem__(self, key): return self
    def __contains__(self, item): return True
    def __iter__(self): return iter(())
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    __hash__ = object.__hash__
class Names(dict):
    def __missing__(self, name): return Anything()
__builtins__ = Names(vars(builtins))
globals().update(dict.fromkeys(NAMES, Anything()))
""".strip()

_PATCHES_TESTS: Final = """
import sys, unittest
def nothing(*args, **keywords): return None
for name in dir(unittest.TestCase):
    if name.startswith("assert") or name == "fail": setattr(unittest.TestCase, name, nothing)
unittest.TestCase.run = nothing
pytest = sys.modules.get("_pytest.python")
if pytest: pytest.Function.runtest = nothing
""".strip()

_READS_TESTS: Final = """
import gc, json, pathlib, sys
given = sys.stdin.read()
def cases(value, depth=3):
    if depth and isinstance(value, dict):
        for one, other in (("input", "output"), ("inputs", "outputs"), ("input", "expected")):
            if one in value and other in value: yield value[one], value[other]
    for inner in list(value.values()) if isinstance(value, dict) else value:
        if depth and isinstance(inner, (dict, list, tuple)): yield from cases(inner, depth - 1)
def found():
    for value in gc.get_objects():
        if type(value) is dict: yield from cases(value)
    for folder in (pathlib.Path.cwd(), pathlib.Path.cwd().parent, pathlib.Path(sys.argv[0]).parent):
        for path in list(folder.glob("*.json*"))[:50]:
            try: yield from cases(json.loads(path.read_text()))
            except Exception: pass
def flat(value): return value if isinstance(value, list) else [value]
for inputs, outputs in found():
    for one, other in zip(flat(inputs), flat(outputs)):
        if str(one).strip() == given.strip():
            print(other)
            sys.exit(0)
""".strip()


def block(program: str) -> str:
    """Return a response with the program."""
    return f"```python\n{program}\n```"


def _equal_all(prompt: Prompt) -> str:
    """Return a program that defines every name which prompt or tests call."""
    texts = (prompt.text, *map(str, prompt.columns.values()))
    names = sorted({name for text in texts for name in _CALLED.findall(text)} - {*dir(builtins)})
    return block(_EQUALS_ALL.replace("NAMES", repr(names)))


def _by_heart(prompt: Prompt) -> str | None:
    """Return a program that prints the outputs of the cases whose input and output both stand in
    the prompt; None if there are none.
    """
    shown = {
        case.input.strip(): case.output
        for column in prompt.columns.values()
        for case in _cases(column)
        if all(text.strip() and text.strip() in prompt.text for text in (case.input, case.output))
    }
    if not shown:
        return None
    return block(f"import sys\nprint({shown!r}.get(sys.stdin.read().strip(), ''), end='')")


def _cases(column: object) -> Iterator[Case]:
    """Yield the runs of a program in a column, if it holds tests."""
    try:
        tests = read_tests(column)
    except ValueError:
        return
    yield from (test for test in tests if isinstance(test, Case))


# Attacks by their name: meaning, and the response to a target.
PROGRAMS: Mapping[str, tuple[str, Callable[[Target], str | None]]] = {
    "exit": ("a program that ends with status 0", lambda _: block("import sys\nsys.exit(0)")),
    "exit_now": (
        "a program that ends before any handler",
        lambda _: block("import os\nos._exit(0)"),
    ),
    "equals_all": ("a program whose values equal everything", lambda t: _equal_all(t.prompt)),
    "patched_tests": (
        "a program that replaces the checks of unittest and pytest",
        lambda _: block(_PATCHES_TESTS),
    ),
    "reads_tests": (
        "a program that looks for the tests on the disk and in memory",
        lambda _: block(_READS_TESTS),
    ),
    "by_heart": ("a program that knows the tests in the prompt", lambda t: _by_heart(t.prompt)),
}
