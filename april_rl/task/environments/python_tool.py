"""Environments that run Python programs of the policy, in the sandbox of the reward `code`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from april_rl.jail.sandbox import Level
from april_rl.task.environments.protocol import StepResult, Turn
from april_rl.task.rewards.builtin.code import WALL_PER_CPU, open_sandbox

# The sandbox drops standard error, so the traceback goes to standard output; its first frame, which
# is not in the policy's program, is left out.
_PROGRAM = """
import sys, traceback
try:
    exec(compile({code!r}, "program", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    error.__traceback__ = error.__traceback__.tb_next
    traceback.print_exception(error, file=sys.stdout)
"""

_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_EXPLANATION = (
    "You may run Python programs. To run one, end your turn with it in a block that begins with "
    "```python and ends with ```; the next message has what it prints. When you know the answer, "
    "end with a turn without a program."
)


class PythonTool:
    """An environment in TRL's form with the tool `python`, which gives no reward."""

    def __init__(
        self,
        timeout_s: float = 5.0,
        memory_gib: float = 1.0,
        max_characters: int = 2000,
        sandbox: Level = "landlock",
    ) -> None:
        """`timeout_s` is the CPU time of a program; the first `max_characters` of its output are
        returned. Raise SandboxError if landlock does not isolate here.
        """
        self._sandbox = open_sandbox(sandbox, memory_gib=memory_gib).sandbox
        self._timeout_s, self._max_characters = timeout_s, max_characters

    def reset(self) -> None:
        """Begin; every program starts from an empty state."""

    def python(self, code: str) -> str:
        """Run a Python program and return its output.

        Args:
            code: The program. It has to print its results; no variable is kept for the next one.
        """
        program = _PROGRAM.format(code=code)
        with self._sandbox.start(program, timeout_s=self._timeout_s) as opened:
            finished = opened.run(wall_s=self._timeout_s * WALL_PER_CPU)
        printed = finished.output[: self._max_characters]
        if finished.limit in ("cpu", "wall"):
            return f"{printed}\nThe program was stopped after {self._timeout_s:g} s."
        return printed or "The program printed nothing."


class PythonBlocks:
    """Environment for models without tool calls: the last block of Python in a turn is run, and
    the policy reads its output as a user message. A turn without a block ends the episode.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        self._tool = PythonTool(**settings)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:  # noqa: ARG002
        """Explain how a program is run; every program starts from an empty state."""
        return _EXPLANATION

    def step(self, turn: Turn) -> StepResult:
        """Run the turn's last block."""
        # Code in the thoughts is only a draft and is not run.
        said = turn.text.rpartition("</think>")[2]
        blocks = _BLOCK.findall(said)
        if not blocks or turn.is_truncated:
            return StepResult(is_final=True)
        return StepResult(f"Output:\n{self._tool.python(blocks[-1])}")
