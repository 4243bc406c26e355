"""The environment of the recipe `tiny_tools_cpu`: sums, with a slow calculator for a second try."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from april_rl.task.environments.calls import Call
from april_rl.task.environments.protocol import Context, StepResult, Turn

_STATED = re.compile(r"\\boxed\{\s*(\d+)\s*\}")
_TERM = re.compile(r"([a-z])(\d)")
_SECOND_TRY = 0.5  # the reward of a right answer with the calculator's help
# Share of the calls that are slow, and how many times slower they are.
_SLOW_SHARE, _SLOWER = 0.05, 10


class Sums:
    """Checks a sum; after a wrong answer the calculator adds up, and the policy answers again."""

    def __init__(self, median_s: float = 0.05, log: str | None = None) -> None:
        """`median_s` is the median time of a call of the calculator; one in twenty takes ten times
        that. `log` is a file to which the calculator adds a line for each call.
        """
        self._median_s, self._log = median_s, log

    def load(self, context: Context) -> None:
        self._once = context.once

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Take a row of `builtin:arithmetic`."""
        self._terms = [(name, int(value)) for name, value in _TERM.findall(row["prompt"])]
        self._answer, self._num_tries = int(row["answer"]), 0
        self._draw = random.Random(seed)

    async def step(self, turn: Turn) -> StepResult:
        """Check an answer; say the partial sums if it is wrong."""
        self._num_tries += 1
        stated = _STATED.findall(turn.text)
        if stated and int(stated[-1]) == self._answer:
            reward = 1.0 if self._num_tries == 1 else _SECOND_TRY
            return StepResult(reward=reward, is_final=True)
        return StepResult(await self._add_up())

    async def _add_up(self) -> str:
        is_slow = self._draw.random() < _SLOW_SHARE
        takes_s = self._median_s * (_SLOWER if is_slow else 1)
        sums = await self._once(
            partial_sums, [n for _, n in self._terms], takes_s=takes_s, log=self._log
        )
        names = (f"{name}{n}={s}" for (name, n), s in zip(self._terms, sums, strict=True))
        return f" {' '.join(names)} "


async def partial_sums(
    numbers: list[int], *, takes_s: float, log: str | None, call: Call
) -> list[int]:
    """Return the sums of the first numbers like a slow calculator, noting each call in `log`."""
    if log is not None:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{call.key} {call.attempt}\n")
    await asyncio.sleep(takes_s)
    return list(accumulate(numbers))
