"""The agent of the recipe `tiny_agent_cpu`: sums with a second try, through the package openai."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from openai import AsyncOpenAI

_STATED = re.compile(r"\\boxed\{\s*(\d+)\s*\}")
_TERM = re.compile(r"([a-z])(\d)")


async def run(client: AsyncOpenAI, row: Mapping[str, Any], seed: int) -> float:  # noqa: ARG001
    """Ask for the sum, at most twice. Return 1 for a right first answer, 0.5 for a second one."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for reward in (1.0, 0.5):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        stated = _STATED.findall(text)
        if stated and stated[-1] == row["answer"]:
            return reward
        terms = _TERM.findall(row["prompt"])
        sums = accumulate(int(value) for _, value in terms)
        hint = " ".join(f"{name}{n}={s}" for (name, n), s in zip(terms, sums, strict=True))
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f" {hint} "})
    return 0.0
