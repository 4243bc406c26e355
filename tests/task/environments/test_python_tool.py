"""The tool `python`: programs in the sandbox, and what the policy reads from them."""

from __future__ import annotations

import pytest
from transformers.utils import get_json_schema

from april_rl.task.environments.protocol import StepResult, Turn
from april_rl.task.environments.python_tool import PythonBlocks, PythonTool


@pytest.fixture(scope="module")
def tool():
    return PythonTool(timeout_s=1.0, max_characters=60, sandbox="none")


def test_the_description_tells_the_policy_what_the_tool_does():
    """Fails when the docstring is not in the form that transformers reads."""
    shown = get_json_schema(PythonTool(sandbox="none").python)["function"]
    assert shown["description"] == "Run a Python program and return its output."
    assert shown["parameters"]["properties"]["code"]["description"].startswith("The program.")


def test_the_policy_reads_what_a_program_prints_and_its_errors(tool):
    assert tool.python("x = 6\nprint(x * 7)") == "42\n"
    assert tool.python("x = 6") == "The program printed nothing."
    said = PythonTool(sandbox="none").python("print(1)\n1 / 0").splitlines()
    assert (said[0], said[-1]) == ("1", "ZeroDivisionError: division by zero")
    assert [line.strip() for line in said[2:-1]] == ['File "program", line 2, in <module>']
    assert "SyntaxError" in PythonTool(sandbox="none").python("print(")


def test_nothing_is_kept_for_the_next_program(tool):
    tool.python("x = 6")
    assert "NameError" in PythonTool(sandbox="none").python("print(x)")


def test_a_program_that_prints_too_much_or_does_not_end_is_cut(tool):
    assert len(tool.python("print('a' * 100000)")) == 60
    assert tool.python("while True: pass").endswith("The program was stopped after 1 s.")


def blocks_say(text: str, **turn: bool) -> StepResult:
    environment = PythonBlocks(sandbox="none")
    assert "```python" in environment.reset({}, 0)
    return environment.step(Turn(text=text, raw_text=text, **turn))


def test_the_last_block_of_a_turn_is_run_and_its_output_is_the_next_message():
    text = "```python\nprint(1)\n```\nno, rather\n```python\nprint(6 * 7)\n```\nLet us see."
    assert blocks_say(text) == StepResult("Output:\n42\n")


@pytest.mark.parametrize(
    ("text", "is_truncated"),
    [
        ("Answer: 42", False),
        # The program is inside a thought.
        ("```python\nprint(1)\n``` is a draft</think>Answer: 1", False),
        ("```python\nprint(1)\n```", True),
    ],
)
def test_a_turn_without_a_program_ends_the_episode(text, is_truncated):
    assert blocks_say(text, is_truncated=is_truncated) == StepResult(is_final=True)
