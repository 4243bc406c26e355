"""The tool `python`: programs in the sandbox, and what the policy reads of them."""

from __future__ import annotations

import pytest

from april_rl.environments.python_tool import PythonTool


@pytest.fixture(scope="module")
def tool():
    return PythonTool(timeout_s=1.0, max_characters=60, sandbox="none")


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


def test_a_program_that_floods_or_does_not_end_is_cut(tool):
    assert len(tool.python("print('a' * 100000)")) == 60
    assert tool.python("while True: pass").endswith("The program was stopped after 1 s.")
