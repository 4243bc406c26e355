"""The reward of code: blocks, tests as data sets publish them, and what each failure is worth."""

import json

import pytest

from april_rl.rewards.builtin import code as module
from april_rl.rewards.builtin import sandbox
from april_rl.rewards.builtin.code import build, last_block, open_sandbox
from april_rl.rewards.builtin.code_tests import Case, read_tests
from april_rl.rewards.builtin.sandbox import Level, SandboxError
from april_rl.rewards.loading import Built, Context

DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\n"
HALF_RIGHT = "```python\ndef double(x):\n    return x * x\n```"
PROGRAM = "```python\nprint(2 * int(input()))\n```"
ASSERTS = "import math\nassert double(2) == 4\nassert double(3) == 6\n"
CASES = [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "6"}]


CONTEXT = Context(extract="auto", soft_timeout_s=3.0, hard_timeout_s=20.0, folder=None)


def build_code(**args: object) -> Built:
    return build(CONTEXT, **({"sandbox": "none", "timeout_s": 10.0} | args))


def score(response: str, tests: object, **args: object) -> float | None:
    return build_code(**args).reward(["Write it."], [response], [""], tests=[tests])[0]


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
    assert score(HALF_RIGHT, tests, value="all") == 0.0
    assert score(DOUBLE, tests, value="all") == 1.0


@pytest.mark.parametrize("cases", [CASES, json.dumps(CASES)])
def test_programs_are_run_for_every_case(cases: object) -> None:
    assert score(PROGRAM, cases) == 1.0
    assert score("```python\nx = int(input())\nprint(x * x)\n```", cases) == 0.5


def test_a_program_that_prints_the_answer_and_fails_has_failed() -> None:
    assert score("```python\nprint(4)\nraise ValueError\n```", CASES) == 0.0


def test_a_check_function_is_one_test() -> None:
    tests = "def check(f):\n    assert f(2) == 4\n    assert f(3) == 6\n\ncheck(double)\n"
    assert score(DOUBLE, tests) == 1.0
    assert score(HALF_RIGHT, tests) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "no code",
        "```\nprint(4)\n```",
        "```python\nprint(4)\n",
        "```python\ndef double(x: return\n```",
        "```python\nwhile True: pass\n```",
        "```python\nimport os; os._exit(0)\n```",
    ],
)
def test_broken_programs_are_worth_zero(response: str) -> None:
    assert score(response, ASSERTS, timeout_s=1.0) == 0.0


def test_the_last_complete_block_after_the_thinking_counts() -> None:
    assert last_block("```python\na\n```\nor\n```python\nb\n```\n```python\nc") == "b\n"
    assert last_block("<think>```python\na\n```</think> none") is None


def test_responses_of_a_group_keep_their_order() -> None:
    reward = build_code(concurrency=2, column="asserts").reward
    responses = [DOUBLE, "nothing", HALF_RIGHT, DOUBLE]
    assert reward(["p"] * 4, responses, [""] * 4, asserts=[ASSERTS] * 4) == [1.0, 0.0, 0.5, 1.0]


def test_the_column_of_the_tests_is_asked_for_by_name() -> None:
    assert build_code().columns == ("tests",)
    assert build_code(column="asserts").columns == ("asserts",)


def test_a_sandbox_that_breaks_gives_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_code()
    monkeypatch.setattr(sandbox, "BOOTSTRAP", "raise SystemExit('the kernel said no')")
    assert built.reward([""], [DOUBLE], [""], tests=[ASSERTS]) == [None]
    assert "did not close: the kernel said no" in built.last_failure()


def test_code_is_refused_where_nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Level", [Level.RLIMITS])
    open_sandbox.cache_clear()
    with pytest.raises(SandboxError, match="code that a model wrote is not run"):
        build_code(sandbox="auto")


def test_the_strongest_sandbox_gives_the_same_scores() -> None:
    try:
        built = build_code(sandbox="auto")
    except SandboxError as error:
        pytest.skip(str(error))
    assert built.reward([""], [DOUBLE], [""], tests=[ASSERTS]) == [1.0]
    assert "stops writing files, reading files, the network" in built.note


def test_the_note_says_what_the_sandbox_does_not_stop() -> None:
    assert "does not stop writing files" in build_code().note


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"sandbox": "docker"}, "sandbox=docker"),
        ({"value": "most"}, "value=most"),
        ({"timeout_s": 20.0}, "timeout_s=20 must be below reward.hard_timeout_s=20"),
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


def test_statements_that_prepare_others_do_not_count() -> None:
    counts = [check.counts for check in read_tests("x = 1\nassert x\nfor y in [1]:\n    assert y")]
    assert counts == [False, True, True]


def test_white_space_at_line_ends_is_ignored() -> None:
    assert Case(input="", output="1 2\n3\n").is_met("1 2  \r\n3\n\n")
    assert not Case(input="", output="1 2\n3\n").is_met("1  2\n3")
