"""Agents for tests that send the same request more than once."""

from __future__ import annotations

import asyncio
import contextlib


async def said(client):
    messages = [{"role": "user", "content": "a"}]
    answer = await client.chat.completions.create(model="m", messages=messages)
    return answer.choices[0].message.content


async def retry(client, _rest):
    """A client that loses patience asks again and gets the same answer."""
    impatient = client.with_options(timeout=0.3, max_retries=50)
    first = await said(impatient)
    return float(len(first))


async def abandoned(client, _rest):
    """Gives up itself, and asks the same later: nobody has read the answer."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(said(client), 0.3)
    await asyncio.sleep(1.0)
    return float(len(await said(client)))


async def again(client, _rest):
    """The same three times, two of them together, for different answers."""
    first = await said(client)
    both = await asyncio.gather(said(client), said(client))
    return float(len({first, *both}))
