"""Agents for tests that send the same request more than once."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path


async def say(client):
    messages = [{"role": "user", "content": "a"}]
    answer = await client.chat.completions.create(model="m", messages=messages)
    return answer.choices[0].message.content


async def retry(client, _rest):
    """Ask again like a client that has lost patience, and get the same answer."""
    impatient = client.with_options(timeout=0.3, max_retries=50)
    first = await say(impatient)
    return float(len(first))


async def abandoned(client, _rest):
    """Give up on a question, and ask it again later; no client has read the first answer."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(say(client), 0.3)
    await asyncio.sleep(1.0)
    return float(len(await say(client)))


async def again(client, _rest):
    """Ask the same question three times, two of them at once, and get different answers."""
    first = await say(client)
    both = await asyncio.gather(say(client), say(client))
    return float(len({first, *both}))


async def parallel(client, row, _seed):
    """Ask six questions at once, which arrive in reverse order after a restart.

    The reward counts answers that repeat their question.
    """
    note = Path(row["answer"])
    places = range(6) if not note.exists() else range(5, -1, -1)
    note.touch()

    async def one(number, place):
        await asyncio.sleep(0.1 * place)
        messages = [{"role": "user", "content": f"number {number}"}]
        answer = await client.chat.completions.create(model="m", messages=messages)
        return answer.choices[0].message.content == f"said {number}"

    return float(sum(await asyncio.gather(*map(one, range(6), places))))


async def impatient(client, _row, _seed):
    """Ask two questions at once, and give up on one of them before it is answered."""
    kept = asyncio.ensure_future(say(client))
    await asyncio.sleep(0.3)
    with contextlib.suppress(TimeoutError):
        messages = [{"role": "user", "content": "given up"}]
        lost = client.chat.completions.create(model="m", messages=messages)
        await asyncio.wait_for(lost, 0.3)
    await kept
    return float(len(await say(client)))


async def odd(client, row, _seed):
    """Ask a different question after a restart."""
    note = Path(row["answer"])
    messages = [{"role": "user", "content": f"again {note.exists()}"}]
    note.touch()
    await client.chat.completions.create(model="m", messages=messages)
    return 1.0
