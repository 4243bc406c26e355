"""The reward of code: blocks, tests in their published forms, and the value of each failure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from light_samples import whole_sample
from reward_pools import CONTEXT, reward_pool

from april_rl.config.task import RewardConfig
from april_rl.jail import landlock, sandbox
from april_rl.jail.sandbox import Finished, Sandbox, SandboxError
from april_rl.task.rewards.builtin import code as code_module
from april_rl.task.rewards.builtin.code import Code, build, open_sandbox
from april_rl.task.rewards.code.cases import Case
from april_rl.task.rewards.code.sources import split_source
from april_rl.task.rewards.code.task_tests import read_tests
from april_rl.task.rewards.loading import Reward
from april_rl.types import Prompt

DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\n"
HALF_RIGHT = "```python\ndef double(x):\n    return x * x\n```"
PROGRAM = "```python\nprint(2 * int(input()))\n```"
ASSERTS = "import math\nassert double(2) == 4\nassert double(3) == 6\n"
CASES = [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "6"}]


def build_code(**args: object) -> Reward:
    return build(CONTEXT, **({"sandbox": "none", "timeout_s": 8.0} | args))


def score(response: str, tests: object, **args: object) -> float | None:
    return build_code(**args).call(["Write it."], [response], [""], tests=[tests])[0]


@pytest.mark.parametrize(
    "tests",
    [
        ASSERTS,
        ["assert double(2) == 4", "assert double(3) == 6"],
        "from solution import double\n\ndef test_two():\n    assert double(2) == 4\n\n"
        "def test_three():\n    assert double(3) == 6\n",
    ],
)
def test_the_value_is_the_share_of_tests_that_pass(tests: object) -> None:
    assert score(DOUBLE, tests) == 1.0
    assert score(HALF_RIGHT, tests) == 0.5
    assert [score(each, tests, value="all") for each in (HALF_RIGHT, DOUBLE)] == [0.0, 1.0]


@pytest.mark.parametrize("cases", [CASES, json.dumps(CASES)])
def test_programs_are_run_for_every_case(cases: object) -> None:
    assert score(PROGRAM, cases) == 1.0
    assert score("```python\nx = int(input())\nprint(x * x)\n```", cases) == 0.5


def test_a_program_that_prints_the_answer_and_fails_has_failed() -> None:
    assert score("```python\nprint(4)\nraise ValueError\n```", CASES) == 0.0


EQUATIONS = r"""
1 == 1.0; True == 1; (1,) == [1]; [(1, 'a'), {2: {3}}] == [(1, 'a'), {2: {3}}]; '3' == 3; -2 == -2
[float('nan')] == [1]; float('nan') == 1; set() == []; 0.1 + 0.2 == 0.3; None == None; None == False
10**20 == 100000000000000000000; '\ud800\n' == '\ud800\n'; b'x' == b'x'; {1: 2}.keys() == {1}
__import__('collections').Counter('aab') == {'a': 2, 'b': 1}; [1, 2] == [2, 1]
__import__('numpy').float64(2.5) == 2.5; __import__('numpy').bool_(True) == True
"""


@pytest.mark.parametrize("equation", re.split(r"; |\n", EQUATIONS.strip()))
def test_a_value_equals_a_literal_as_in_python(equation: str) -> None:
    value, literal = equation.split(" == ")
    program = f"```python\ndef f():\n    return {value}\nlist = ascii = None\n```"
    tests = f"assert f() == {literal}, 'wrong'\nassert {literal} == f()"
    assert score(program, tests) == float(eval(equation))


def test_a_literal_of_an_assert_never_enters_the_sandbox() -> None:
    [check] = split_source("assert double(2) == 'distinctive'")
    assert "distinctive" not in check.sends
    assert str(check) == "the test \"assert double(2) == 'distinctive'\""
    assert not check.is_met(f"(0, {'[' * 10**6})")
    assert not check.is_met(f"(0, [{'1,' * 10**6}])")
    forged = "```python\nimport os\nfor n in range(9): os.write(3, b'(0, %d)\\n' % n)\n```"
    assert score(forged, ASSERTS) == 0.0


def test_a_check_function_is_one_test() -> None:
    tests = "def check(f):\n    assert f(2) == 4\n    assert f(3) == 6\n\ncheck(double)\n"
    assert score(DOUBLE, tests) == 1.0
    assert score(HALF_RIGHT, tests) == 0.0


BLOCKS = ["def double(x: return", "while True: pass", "import os; os._exit(0)"]
BROKEN = ["no code", "```\nprint(4)\n```", "```python\nprint(4)\n"]


@pytest.mark.parametrize("response", [*BROKEN, *(f"```python\n{each}\n```" for each in BLOCKS)])
def test_broken_programs_are_worth_zero(response: str) -> None:
    assert score(response, ASSERTS, timeout_s=0.5) == 0.0


def test_reward_processes_run_programs_with_many_cases() -> None:
    cases = [{"input": f"{number}", "output": f"{2 * number}"} for number in range(50)]
    prompt = Prompt(
        id=0, token_ids=(1,), text="", answer="", source="f:1", columns={"tests": cases}
    )
    reward = RewardConfig(function="code", args={"sandbox": "none"}, hard_timeout_s=60.0)
    with reward_pool(reward) as pool:
        pool.submit(whole_sample(prompt, 0, tuple(map(ord, PROGRAM))), group_size=1)
        assert [score.value for score in pool.collect(60.0)] == [1.0], pool.last_failure


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("while True: pass", 0.0),
        ("import time\ntime.sleep(60)", 0.0),
        ("print('x' * (20 << 20))", 0.0),
        ("x = int(input())\nprint(2 * x)\nwhile x == 2: pass", 0.0025),
    ],
)
def test_an_endless_case_ends_the_response_with_what_passed_before(
    program: str, share: float
) -> None:
    cases = [{"input": str(n), "output": str(2 * n)} for n in range(1, 401)]
    assert score(f"```python\n{program}\n```", cases, timeout_s=1.0) == share


class CountedSandbox:
    """A sandbox whose programs print 4 after a second on its own clock and use a share of it as CPU
    time.
    """

    def __init__(self, *, used_frac: float) -> None:
        self.used_frac, self.now_s = used_frac, 0.0

    def monotonic(self) -> float:
        return self.now_s

    @contextmanager
    def start(self, code: str, *, timeout_s: float) -> Iterator[CountedSandbox]:  # noqa: ARG002
        yield self

    def run(self, stdin: str, *, wall_s: float) -> Finished:  # noqa: ARG002
        took_s = min(wall_s, 1.0)
        self.now_s += took_s
        return Finished(
            passed=(),
            output="4",
            exit_code=0 if took_s == 1.0 else None,
            limit="" if took_s == 1.0 else "wall",
            used_s=self.used_frac * took_s,
        )


# The limit is reached between two cases, and within one.
@pytest.mark.parametrize("limit_s", [9.0, 9.5])
@pytest.mark.parametrize(("used_frac", "share"), [(0.0, None), (0.5, None), (0.6, 0.45)])
def test_remaining_cases_fail_if_the_program_used_the_time(
    used_frac: float, share: float | None, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = CountedSandbox(used_frac=used_frac)
    monkeypatch.setattr(code_module, "time", fake)
    code = Code(sandbox=fake, value="share", timeout_s=4.0, limit_s=limit_s)
    assert code.score(PROGRAM, [{"input": "", "output": "4"}] * 20) == share
    if share is None:
        assert f"Only 9 of 20 cases ran in {limit_s:g} s, of which the" in code.last_failure
        assert "raise reward.hard_timeout_s" in code.last_failure


def test_a_program_that_sleeps_through_its_cases_fails_the_remaining_ones() -> None:
    code = Code(sandbox=Sandbox(level="none"), value="share", timeout_s=2.0, limit_s=4.0)
    program = "```python\nimport time\ntime.sleep(1.2)\nprint(4)\n```"
    share = code.score(program, [{"input": "", "output": "4"}] * 20)
    assert share is not None, code.last_failure
    assert share < 0.5


def test_with_value_all_the_first_failure_decides() -> None:
    code = Code(sandbox=Sandbox(level="none"), value="all", timeout_s=10.0, limit_s=20.0)
    program = "```python\nimport time\ntime.sleep(0.2)\nprint(5)\n```"
    assert code.score(program, [{"input": "", "output": "4"}] * 200) == 0.0


def test_responses_keep_their_order() -> None:
    reward = build_code(column="asserts").call
    responses = [DOUBLE, "nothing", HALF_RIGHT, DOUBLE]
    assert reward(["p"] * 4, responses, [""] * 4, asserts=[ASSERTS] * 4) == [1.0, 0.0, 0.5, 1.0]


def test_a_missing_tests_column_is_named() -> None:
    assert build_code().columns == ("tests",)
    assert build_code(column="asserts").columns == ("asserts",)


def test_a_sandbox_that_breaks_gives_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_code()
    monkeypatch.setattr(sandbox, "BOOTSTRAP", "raise SystemExit('the kernel said no')")
    assert built.call([""], [DOUBLE], [""], tests=[ASSERTS]) == [None]
    assert "did not close: the kernel said no" in built.last_failure()


def test_code_is_refused_where_landlock_does_not_isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "BOOTSTRAP", "raise SystemExit('there is no Landlock')")
    open_sandbox.cache_clear()
    with pytest.raises(SandboxError, match=r"so it is not run\. .*no Landlock.*sandbox: none"):
        build_code(sandbox="landlock")


@pytest.mark.skipif(landlock.abi_version() == 0, reason="this kernel has no Landlock")
def test_the_isolating_sandbox_gives_the_same_scores() -> None:
    built = build_code(sandbox="landlock")
    assert built.call([""], [DOUBLE], [""], tests=[ASSERTS]) == [1.0]
    assert "stops writing files, reading files, the network" in built.note
    assert "does not stop" not in built.note


def test_the_note_says_what_the_sandbox_does_not_stop() -> None:
    assert "does not stop writing files" in build_code().note


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"sandbox": "docker"}, "sandbox=docker"),
        ({"value": "most"}, "value=most"),
        (
            {"timeout_s": 10.0},
            r"timeout_s=10 must be .* at most 9\.5 with reward\.hard_timeout_s=20",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(args: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_code(**args)


@pytest.mark.parametrize(
    "tests", ["", [], "assert (", 3, None, [{"input": "1"}], "def test_a(x): 1"]
)
def test_tests_that_cannot_be_read_are_an_error(tests: object) -> None:
    with pytest.raises(ValueError, match="test"):
        read_tests(tests)


def test_preparing_statements_do_not_count_as_tests() -> None:
    counts = [check.counts for check in read_tests("x = 1\nassert x\nfor y in [1]:\n    assert y")]
    assert counts == [False, True, True]


def test_white_space_at_line_ends_is_ignored() -> None:
    assert Case(input="", output="1 2\n3\n").is_met("1 2  \r\n3\n\n")
    assert not Case(input="", output="1 2\n3\n").is_met("1  2\n3")


@pytest.mark.parametrize(
    ("printed", "expected", "is_met"),
    [
        ("0.5", "0.5000", True),
        ("0.3333333", "0.333333", True),
        ("0.33", "0.333333", False),
        ("1e-07\n", "0.0000001", True),
        ("1", "1.0", True),
        ("nan", "0.5", False),
        ("1.0", "1", False),  # a whole number is expected
        ("12345678.25", "12345679.25", True),
        ("12345678", "12345679", False),
        ("x 2.50 -1", "x 2.5 -1", True),
        ("x  2.50", "x 2.5", False),
        ("2.5.0", "2.50", False),
        ("v1.10", "v1.1", False),
    ],
)
def test_a_decimal_number_is_compared_by_value(printed: str, expected: str, is_met: bool) -> None:
    assert Case(input="", output=expected).is_met(printed) is is_met


@pytest.mark.parametrize("level", ["landlock", "none"])
def test_a_program_may_open_its_input_by_name(level: str) -> None:
    if level == "landlock" and landlock.abi_version() == 0:
        pytest.skip("this kernel has no Landlock")
    program = "```python\nwith open('/dev/stdin') as file:\n    print(2 * int(file.read()))\n```"
    assert score(program, CASES, sandbox=level) == 1.0


def test_a_missing_entry_point_column_is_named() -> None:
    built = build_code(entry_column="entry_point")
    assert built.columns == ("tests", "entry_point")
    tests = ["def check(candidate):\n    assert candidate(2) == 4"]
    names = {"entry_point": ["double"]}
    assert built.call([""], [DOUBLE], [""], tests=tests, **names) == [1.0]
    assert built.call([""], [HALF_RIGHT.replace("* x", "- x")], [""], tests=tests, **names) == [0.0]
