"""An agent for `kill_anywhere`: sums with a second try, and a slow tool whose calls are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from april_rl.task.environments.calls import Call
from april_rl.task.environments.protocol import Context
from april_rl.task.environments.tiny_sums import partial_sums

_TOOL_S = 0.1
_ONE_IN = 5  # one in this many of the tool's calls fails at its first attempt, after its work


async def run(
    client: AsyncOpenAI, row: Mapping[str, Any], seed: int, *, log: str, context: Context
) -> float:
    """Ask, call the tool, and ask again, twice; begin a new context. Return the share of answers
    with the right number; `log` is the file to which the tool adds a line for each call. A call
    that fails is made again.
    """
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    num_right = 0
    for number in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        num_right += row["answer"] in text
        try:
            sums = await context.once(_failing_sums, [number, seed % 9], log=log)
        except ConnectionError:
            sums = await context.once(_failing_sums, [number, seed % 9], log=log)
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f" {sums[-1]} "})
        if number == 1:
            del messages[1:]
    return num_right / 3


async def _failing_sums(numbers: list[int], *, log: str, call: Call) -> list[int]:
    sums = await partial_sums(numbers, takes_s=_TOOL_S, log=log, call=call)
    if call.attempt == 1 and int(call.key, 16) % _ONE_IN == 0:
        raise ConnectionError("the answer was lost")
    return sums
