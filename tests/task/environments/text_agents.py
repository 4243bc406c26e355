"""Agents for tests that continue texts, set limits, and ask for log-probabilities."""

from __future__ import annotations

import json

from openai import BadRequestError


async def short(client, _rest):
    """Set a limit for the first answer and none for the second."""
    messages = [{"role": "user", "content": "a"}]
    answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    messages += [answer.choices[0].message, {"role": "user", "content": "b"}]
    answer = await client.chat.completions.create(model="m", messages=messages)
    return float(len(answer.choices[0].message.content))


async def text(client, _rest):
    """Continue a text twice, the second time as a stream, and then another text."""
    prompt = "once "
    asked = {"model": "m", "max_tokens": 50, "stop": "."}
    answer = await client.completions.create(prompt=prompt, logprobs=0, **asked)
    (choice,) = answer.choices
    assert choice.logprobs.token_logprobs == [-0.5] * answer.usage.completion_tokens
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    prompt += choice.text + ". more: "
    stream = await client.completions.create(prompt=prompt, stream=True, **asked)
    told = [event async for event in stream]
    assert told[-1].choices[0].finish_reason == "stop"
    await client.completions.create(model="m", prompt=prompt + told[0].choices[0].text + "!")
    return float(len(choice.text) * 10 + sum(len(event.choices[0].text) for event in told))


async def likely(client, _rest):
    """Return the sum of the log-probabilities of an answer."""
    messages = [{"role": "user", "content": "a"}]
    asked = {"model": "m", "messages": messages, "logprobs": True}
    (choice,) = (await client.chat.completions.create(**asked)).choices
    text = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
    assert text.startswith(choice.message.content), text
    return sum(token.logprob for token in choice.logprobs.content)


async def refused(client, rest):
    """Ask for a text with a parameter that is refused."""
    try:
        await client.completions.create(**{"model": "m", "prompt": "a", **json.loads(rest)})
    except BadRequestError as error:
        await client.completions.create(model="m", prompt="a")
        return float(next(iter(json.loads(rest))) in str(error))
    return -1.0
