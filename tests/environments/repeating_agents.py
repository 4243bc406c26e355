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
    """A client that loses patience asks again and gets the same answer."""
    impatient = client.with_options(timeout=0.3, max_retries=50)
    first = await say(impatient)
    return float(len(first))


async def abandoned(client, _rest):
    """Gives up itself, and asks the same later: nobody has read the answer."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(say(client), 0.3)
    await asyncio.sleep(1.0)
    return float(len(await say(client)))


async def again(client, _rest):
    """The same three times, two of them together, for different answers."""
    first = await say(client)
    both = await asyncio.gather(say(client), say(client))
    return float(len({first, *both}))


async def parallel(client, row, _seed):
    """Six questions at a time, which arrive in the other order when it is started again; rewarded
    for each answer that repeats its question.
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
    """Asks two things at a time and gives one of them up before it is answered."""
    kept = asyncio.ensure_future(say(client))
    await asyncio.sleep(0.3)
    with contextlib.suppress(TimeoutError):
        messages = [{"role": "user", "content": "given up"}]
        lost = client.chat.completions.create(model="m", messages=messages)
        await asyncio.wait_for(lost, 0.3)
    await kept
    return float(len(await say(client)))


async def odd(client, row, _seed):
    """Asks something else when it is started again."""
    note = Path(row["answer"])
    messages = [{"role": "user", "content": f"again {note.exists()}"}]
    note.touch()
    await client.chat.completions.create(model="m", messages=messages)
    return 1.0
