"""The forms in which code tests are published, each tried with a wrong program, a correct one and
one that does nothing.

docs/rewards.md lists the forms; each has an entry here.
"""

from __future__ import annotations

import json
import re

import pytest
from source_tree import ROOT

from april_rl.jail.sandbox import Sandbox
from april_rl.task.rewards.builtin.code import Code
from april_rl.task.rewards.code.task_tests import read_tests

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
RIGHT = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a, b):\n        print(a)\n        return a + b"
WRONG = "def add(a, b):\n    return a - b"
SUM, DIFFERENCE = (f"a, b = map(int, input().split())\nprint(a {sign} b)" for sign in "+-")
CHECK = "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"
GUARD = 'if __name__ == "__main__":\n    '
UNITTEST = """import unittest
from solution import add
class AddTests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.one = 1
    def setUp(self):
        self.two = 2
    def test_add(self):
        self.assertEqual(add(self.one, self.two), 3)
"""
INHERITED = """from unittest import IsolatedAsyncioTestCase
class Base(IsolatedAsyncioTestCase):
    pass
class AddTests(Base):
    async def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""
CLASS = """from solution import add
class TestAdd:
    def setup_class(cls):
        cls.one = 1
    def setup_method(self, method):
        self.two = 2
    def test_add(self):
        assert add(self.one, self.two) == 3
    async def test_again(self):
        assert add(self.two, self.two) == 4
"""
PROGRAM = {"input": "1 2\n", "output": "3\n"}
LINES = {"input": "1\n2", "output": "3"}
CALL = {"fn_name": "add", "type": "function_call", "input": [1, 2], "output": [3]}
APPS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
PRIME = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}
STDIN = {"inputs": ["1 2", ["3 4"]], "outputs": ["3", ["7"]]}

# The forms on the page: tests in their published form, and the value of `entry_column`.
FORMS: dict[str, list[tuple[object, object]]] = {
    "asserts": [
        ("x = add(1, 2)\nassert x == 3", None),
        ("for n in [1, 2]:\n    if add(n, 0) != n or add(0, n) != n: raise ValueError", None),
        ("import numpy\nnumpy.testing.assert_equal(add(1, 2), 3)", None),
    ],
    "list of sources": [
        (["from math import pi", "assert add(1, 2) == 3", "def test():\n    assert add(2, 2) == 4"],
         None),
        (json.dumps(json.dumps(["assert add(1, 2) == 3"])), None),
    ],
    "check with its call": [(CHECK + "check(add)", None)],
    "check without its call": [(CHECK, "add"), (CHECK, '{"func_name": "add"}')],
    "test functions": [
        ("def test_add():\n    assert add(1, 2) == three()\ndef three():\n    return 3", None),
        ("def testAdd():\n    assert add(1, 2) == 3", None),
        ("def test():\n    assert add(1, 2) == 3\n" + GUARD + "test()", None),
        ("def test(f):\n    assert f(1, 2) == 3\ntest(add)", None),
        ("async def test_add():\n    assert add(1, 2) == 3", None),
    ],
    "run_tests": [
        ("def run_tests():\n    assert add(1, 2) == 3", None),
        ("def test_a():\n    assert add(1, 2) == 3\ndef run_tests():\n    test_a()", None),
    ],
    "guard": [
        ("def main():\n    assert add(1, 2) == 3\n" + GUARD + "main()", None),
        (GUARD + "assert add(1, 2) == 3", None),
    ],
    "test class": [(CLASS, None)],
    "unittest": [
        (UNITTEST, None),
        (UNITTEST + GUARD + "unittest.main()", None),
        (UNITTEST + "unittest.main()", None),
        (INHERITED, None),
    ],
    "programs": [
        ([PROGRAM], None),
        (json.dumps([PROGRAM | {"testtype": "stdin"}]), None),
        ([json.dumps(PROGRAM | {"type": "stdin_stdout", "testtype": None, "fn_name": None})], "{}"),
    ],
    "calls": [
        ([LINES | {"testtype": "functional"}], '{"func_name": "add"}'),
        (json.dumps([LINES | {"testtype": "functional", "metadata": {"func_name": "add"}}]), None),
        ([CALL], None),
    ],
    "inputs and outputs": [(STDIN, None), (json.dumps(STDIN | {"fn_name": None}), None)],
    "inputs and outputs of a function": [
        (APPS, None),
        (json.dumps(APPS), None),
        (json.dumps(PRIME), None),
    ],
    "ground truth": [({"style": "rule", "ground_truth": json.dumps(PRIME)}, None)],
    "test cases with a language": [
        ({"language": "python", "test_cases": [CALL]}, None),
        (json.dumps({"language": "python", "test_cases": [PROGRAM]}), None),
    ],
}  # fmt: skip
ASKS_FOR_A_PROGRAM = "1 2"


def score(program: str, tests: object, entry: object = None, **settings: object) -> float | None:
    code = Code(
        **{"sandbox": Sandbox(level="none"), "value": "share", "timeout_s": 8.0, "limit_s": 60.0}
        | settings
    )
    return code.score(f"```python\n{program}\n```", tests, entry)


def test_the_page_and_this_file_have_the_same_forms() -> None:
    section = PAGE[PAGE.index("## Tests of code") :]
    table = section[section.index("| form |") : section.index("\n\n- ")]
    assert re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:] == [*FORMS]


@pytest.mark.parametrize(
    ("tests", "entry"), [pytest.param(*each, id=form) for form in FORMS for each in FORMS[form]]
)
def test_only_the_right_program_is_rewarded_not_a_wrong_one_or_one_that_does_nothing(
    tests: object, entry: object
) -> None:
    is_program = ASKS_FOR_A_PROGRAM in json.dumps(tests)
    right, wrong = (SUM, DIFFERENCE) if is_program else (RIGHT, WRONG)
    assert score(right, tests, entry) == 1.0
    assert score(wrong, tests, entry) == 0.0
    assert score("pass", tests, entry) == 0.0


@pytest.mark.parametrize("tests", [UNITTEST, [PROGRAM], [CALL]])
def test_a_program_that_raises_passes_no_test(tests: object) -> None:
    assert score("raise RuntimeError", tests) == 0.0


@pytest.mark.parametrize("tests", [APPS, [CALL], PRIME])
def test_a_method_of_the_class_solution_is_called_too(tests: object) -> None:
    assert score(METHOD, tests) == 1.0
    assert score(METHOD.replace("+", "-"), tests) == 0.0


def test_every_test_is_counted_once() -> None:
    tests = (
        "def test_one():\n    assert add(1, 2) == 3\ndef test_two():\n    assert add(2, 2) == 0\n"
        "def run_tests():\n    test_one()\n    test_two()\n" + GUARD + "run_tests()"
    )
    assert score(RIGHT, tests) == score(WRONG, tests) == 0.5
    assert score(RIGHT, CLASS.replace("== 4", "== 5")) == 0.5
    assert score(RIGHT, APPS | {"outputs": [3, [3, 4]]}) == 0.5


REFUSED: dict[str, tuple[object, str]] = {
    "an object": ({"a": 1}, r"must be Python source .*; got \{'a': 1\}"),
    "an object as JSON text": ('{"a": 1}', r"must be Python source .*; got \{'a': 1\}"),
    "a number": (3, "must be Python source .*; got 3"),
    "a list of numbers": ([1], r"must be Python source .*; got \[1\]"),
    "nothing": ("[]", "has no tests"),
    "no case": ({"language": "python", "test_cases": []}, "has no tests"),
    "no inputs": ({"inputs": [], "outputs": []}, "has no tests"),
    "another language": ({"language": "cpp", "test_cases": [PROGRAM]}, "language cpp, not Python"),
    "an unknown type": ([PROGRAM | {"type": "files"}], "the type 'files'; the known types are f"),
    "a call of what": ([LINES | {"testtype": "functional"}], "entry_column: metadata"),
    "check of what": (CHECK, "entry_column: entry_point"),
    "arguments that are no JSON": ({**PRIME, "inputs": ["a", "b"]}, "JSON text, one argument per"),
    "a missing output": ({**APPS, "outputs": [3]}, "as many outputs as inputs"),
    "both kinds": ([PROGRAM, CALL], "call a function and cases that run a program"),
    "definitions": ("def verify():\n    assert add(1, 2) == 3", "have no assert that runs"),
    "expressions": ("add(1, 2) == 3", "have no assert that runs"),
    "a list of expressions": (["add(1, 2) == 3"], "have no assert that runs"),
    "fixtures": ("def test_add(tmp_path):\n    assert add(1, 2) == 3", "test_add needs arguments"),
    "parameters": (
        "import pytest\n@pytest.mark.parametrize('n', [1])\ndef test_add(n=1):\n    assert n",
        "test_add needs arguments",
    ),
    "automatic fixtures": (
        "import pytest\nclass TestAdd:\n    @pytest.fixture(autouse=True)\n"
        "    def one(self): pass\n    def test_add(self): assert add(1, 2) == 3",
        "one needs arguments",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_parameters_are_refused_by_name(name: str) -> None:
    tests, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


WEAK: dict[str, tuple[object, str]] = {
    "assert": ("assert add(1, 2) == 3\nassert True", "the test 'assert True'"),
    "caught": ("try:\n    assert add(1, 2)\nexcept Exception:\n    x = 1", "the test 'try"),
    "anything raises": (
        "import unittest\nclass A(unittest.TestCase):\n    def test_add(self):\n"
        "        with self.assertRaises(Exception): add(None, None)",
        "the test .*debug",
    ),
    "no output": ([PROGRAM, {"input": "3", "output": " \n"}], "the case with input '3'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WEAK)
def test_a_test_that_a_program_passes_without_doing_anything_is_named(name: str) -> None:
    tests, message = WEAK[name]
    with pytest.raises(ValueError, match=f"the program 'pass' passes {message}.*is not a test"):
        score("pass", tests)


def test_with_value_all_one_weak_test_does_no_harm() -> None:
    assert score("pass", "assert add(1, 2) == 3\nassert True", value="all") == 0.0
    with pytest.raises(ValueError, match="is not a test"):
        score("pass", "assert True", value="all")


EQUAL: dict[str, object] = {
    "(1, [2, (3,)])": [1, [2, [3]]],
    "{1: 'a'}": {"1": "a"},
    "0.1 + 0.2": 0.3,
    "1.0": 1,
    "None": None,
    "__import__('numpy').arange(2) + 0.5": [0.5, 1.5],
    "3": [3],
}
DIFFERENT: dict[str, object] = {
    "0.3001": 0.3,
    "10**20 + 1": 10**20,
    "True": 1,
    "'3'": 3,
    "{1, 2}": [1, 2],
    "[3]": 3,
    "[1, 2]": [2, 1],
}


@pytest.mark.parametrize(("values", "share"), [(EQUAL, 1.0), (DIFFERENT, 0.0)])
def test_returned_values_are_compared_as_json(values: dict[str, object], share: float) -> None:
    """Expected values by expression: a function evaluates its argument."""
    tests = {"fn_name": "f", "inputs": [[each] for each in values], "outputs": [*values.values()]}
    assert score("def f(text):\n    return eval(text)", tests) == share


def test_the_expected_value_of_a_call_never_enters_the_sandbox() -> None:
    """The program searches its memory for the value, which its own source only contains
    reversed.
    """
    look = (
        "import gc, sys\ndef f(value):\n    texts = [repr(o) for o in gc.get_objects()]\n"
        "    texts.append(repr(vars(sys.modules['__main__'])))\n"
        "    wanted = ''.join(reversed('evitcnitsid'))\n"
        "    return wanted if any(wanted in text for text in texts) else ''\n"
    )
    calls = {"fn_name": "f", "inputs": [[""]], "outputs": ["distinctive"]}
    assert score(look, calls) == 0.0
    assert score(look, calls | {"inputs": [["distinctive"]]}) == 1.0
