"""Agents for tests that look at the server itself, without a client."""

from __future__ import annotations

import asyncio
from pathlib import Path


async def say(client):
    asked = [{"role": "user", "content": "a"}]
    return (await client.chat.completions.create(model="m", messages=asked)).choices[0].message


async def where(client, _row, _seed):
    """Return a reward if the server listens at 127.0.0.2 and not at 127.0.0.1."""
    await say(client)
    try:
        await asyncio.open_connection("127.0.0.1", client.base_url.port)
    except ConnectionRefusedError:
        return float(client.base_url.host == "127.0.0.2")
    return -1.0


async def betray(client, row, _seed):
    """Write the server's address and key to a file."""
    Path(row["answer"]).write_text(f"{client.base_url} {client.api_key}")
    await say(client)
    return 1.0
