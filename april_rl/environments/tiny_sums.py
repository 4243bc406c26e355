"""The environment of the recipe `tiny_tools_cpu`: sums, with a slow calculator for a second try."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from april_rl.environments.protocol import StepResult, Turn

_STATED = re.compile(r"\\boxed\{\s*(\d+)\s*\}")
_TERM = re.compile(r"([a-z])(\d)")
_SECOND_TRY = 0.5  # the reward of a right answer with the calculator's help
_SLOW_SHARE, _SLOWER = 0.05, 10  # of the calls, times as long


class Sums:
    """Checks a sum; after a wrong answer the calculator adds up, and the policy answers again."""

    def __init__(self, median_s: float = 0.05) -> None:
        """`median_s` is what a call of the calculator takes; one in twenty takes ten times that."""
        self._median_s = median_s

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
        return StepResult(await self._added_up())

    async def _added_up(self) -> str:
        is_slow = self._draw.random() < _SLOW_SHARE
        await asyncio.sleep(self._median_s * (_SLOWER if is_slow else 1))
        sums = accumulate(value for _, value in self._terms)
        names = (f"{name}{value}={s}" for (name, value), s in zip(self._terms, sums, strict=True))
        return f" {' '.join(names)} "
