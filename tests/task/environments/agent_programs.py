"""Agents for tests; the first word of the question selects the behaviour."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx
from calling_agents import WEATHER, tool, way_back
from openai import BadRequestError, OpenAI
from repeating_agents import abandoned, again, retry
from text_agents import likely, refused, short, text


async def say(client, messages, **wishes):
    answer = await client.chat.completions.create(model="m", messages=messages, **wishes)
    return answer.choices[0].message


async def run(client, row, _seed):
    what, _, rest = row["prompt"].partition(" ")
    return await PROGRAMS[what](client, rest)


async def talk(client, rest):
    """Make two requests; the reward is the length of the answers."""
    messages = [{"role": "user", "content": rest}]
    first = await say(client, messages)
    messages += [first, {"role": "user", "content": "more"}]
    second = await say(client, messages)
    return float(len(first.content + second.content))


async def rewrite(client, _rest):
    """Forget the first request in the second one, and continue from the second in the third."""
    await say(client, [{"role": "user", "content": "first"}])
    messages = [{"role": "user", "content": "second"}]
    messages += [await say(client, messages), {"role": "user", "content": "more"}]
    return float(len((await say(client, messages)).content))


async def wish(client, rest):
    """Make a request with the parameters in the question; if it is refused, the reward is 3."""
    try:
        await say(client, [{"role": "user", "content": "a"}], **json.loads(rest))
    except BadRequestError:
        await say(client, [{"role": "user", "content": "a"}])
        return 3.0
    return 1.0


async def stopped(client, rest):
    """Count the characters of an answer that the agent reads, which a stop text cuts off."""
    messages = [{"role": "user", "content": "a"}]
    message = await say(client, messages, **json.loads(rest))
    again = {"role": "assistant", "content": f"{message.content}</code>\n"}
    messages += [again, {"role": "user", "content": "b"}]
    await say(client, messages)
    return float(len(message.content))


async def stream(client, _rest):
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "a"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reason = "", None, None
    async for event in stream:
        for choice in event.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        usage = event.usage or usage
    assert usage is not None
    assert reason == "stop"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 20
    return float(usage.completion_tokens) + 0.1 * len(text)


async def twice(client, _rest):
    """Make two requests at once, in two conversations."""
    first, second = await asyncio.gather(
        say(client, [{"role": "user", "content": "a"}]),
        say(client, [{"role": "user", "content": "b"}]),
    )
    return float(len(first.content) * 10 + len(second.content))


async def late(client, _rest):
    """Make two requests when there is room for one, so that the other is refused; the reward
    counts.
    """
    both = await asyncio.gather(
        say(client, [{"role": "user", "content": "a"}]),
        say(client, [{"role": "user", "content": "b"}]),
        return_exceptions=True,
    )
    refused = [each for each in both if isinstance(each, BadRequestError)]
    return 2.0 if len(refused) == 1 and "is used up" in str(refused[0]) else -1.0


async def subagent(client, _rest):
    """Ask a subagent with a tool in between."""
    messages = [{"role": "user", "content": "main"}]
    messages.append(await say(client, messages))
    helped = await say(client, [{"role": "user", "content": "sub"}], tools=[WEATHER])
    messages.append({"role": "user", "content": helped.content})
    return float(len((await say(client, messages)).content))


async def count_call(client, row, _seed, *, context):
    """Call a tool with a side effect twice; it runs once in the life of the sample."""
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        messages.append(await say(client, messages))
        number = await context.once(_note, row["answer"])
        messages.append({"role": "user", "content": f"line {number}"})
    return float(number)


async def _note(path):
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("called\n")
    return len(Path(path).read_text().splitlines())


async def examples(client, _rest):
    """Send few-shot examples, with the newer name of a system message."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]
    return float(len((await say(client, messages)).content))


async def broken(_client, _rest):
    raise KeyError("a column is missing")


async def leave(_client, _rest):
    sys.exit(3)


async def scoring(client, _rest):
    await say(client, [{"role": "user", "content": "a"}])
    raise KeyError("a bug behind the last turn")


async def odd(client, _rest):
    """Send bodies that no Python client writes."""
    url, headers = (
        f"{client.base_url}chat/completions",
        {"Authorization": f"Bearer {client.api_key}"},
    )
    user = '{"role": "user", "content": "a"}'
    for message in (
        '{"role": "user", "content": "\\udcff"}',
        '{"role": "user", "content": 5}',
        '{"role": "friend", "content": "a"}',
        '{"role": "assistant", "tool_calls": ["x"]}',
    ):
        async with httpx.AsyncClient() as http:
            body = f'{{"messages": [{user}, {message}]}}'
            response = await http.post(url, content=body.encode(), headers=headers)
            assert response.status_code == 400, message
    await say(client, [{"role": "user", "content": "a"}])
    return 8.0


async def loop(client, _rest):
    """Ask forever."""
    messages = [{"role": "user", "content": "a"}]
    while True:
        messages += [await say(client, messages), {"role": "user", "content": "b"}]


async def silent(_client, _rest):
    return 1.0


async def hang(client, _rest):
    await say(client, [{"role": "user", "content": "a"}])
    await asyncio.sleep(600)


async def fail(client, _rest):
    await say(client, [{"role": "user", "content": "a"}])
    raise KeyError("a tool is missing")


async def words(client, _rest):
    await say(client, [{"role": "user", "content": "a"}])
    return "much"


async def huge(client, _rest):
    """Send a body that is too long."""
    url = f"{client.base_url}chat/completions"
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with httpx.AsyncClient() as http:
        response = await http.post(url, content=b"x" * (5 << 20), headers=headers)
        assert response.status_code == 413
        response = await http.post(url, content=b"{", headers=headers)
        assert response.status_code == 400
        response = await http.post(url, content=b"{}", headers={"Authorization": "Bearer no"})
        assert response.status_code == 401
        assert (await http.get(f"{client.base_url}models")).status_code == 401
        for depth in (100, 100_000):  # a body that JSON can read, and one that it cannot
            deep = b'{"messages": [{"role": "user", "content": "a", "x": %b%b}]}'
            body = deep % (b"[" * depth, b"]" * depth)
            response = await http.post(url, content=body, headers=headers)
            assert (response.status_code, "nested" in response.text) == (400, True)
        response = await http.post(f"{client.base_url}responses", json={}, headers=headers)
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert message.startswith(
            "POST /v1/responses is not served; this endpoint serves POST /v1/chat/"
        )
    await say(client, [{"role": "user", "content": "a"}])
    return 4.0


async def models(client, _rest):
    first = [model.id async for model in await client.models.list()]
    await say(client, [{"role": "user", "content": "a"}])
    return float(first == ["policy"])


PROGRAMS = {
    each.__name__: each
    for each in (
        *(examples, broken, leave, scoring, abandoned, again, odd),
        *(stopped, talk, rewrite, wish, retry, stream, twice, late, subagent),
        *(way_back, loop, silent),
        *(hang, fail, words, huge, models, tool, short, text, likely, refused),
    )
}


async def shorter_again(client, row, _seed):
    """Make three requests, but only one when the agent is started a second time."""
    note = Path(row["answer"])
    num_requests = 1 if note.exists() else 3
    note.touch()
    for number in range(num_requests):
        await say(client, [{"role": "user", "content": str(number)}])
    return 1.0


async def told(client, _row, seed, *, extra):
    await say(client, [{"role": "user", "content": extra}])
    return float(seed)


def main() -> None:
    """Run as a command: make two requests and print the reward, or complain."""
    row = json.loads(os.environ["APRIL_RL_ROW"])
    client = OpenAI()
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        answer = client.chat.completions.create(model="m", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
    if row["prompt"] == "complain":
        sys.exit("it is too hot")
    print("working", flush=True)
    print(row["answer"] if row["prompt"] == "chat" else len(row["answer"]))


if __name__ == "__main__":
    main()
