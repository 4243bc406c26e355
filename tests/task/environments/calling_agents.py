"""Agents for tests that have tools, which the policy calls."""

from __future__ import annotations

import json

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def say(client, messages, **wishes):
    answer = await client.chat.completions.create(model="m", messages=messages, **wishes)
    return answer.choices[0].message


async def tool(client, _rest):
    """Read calls of a tool, return their results, and reward the last answer."""
    messages = [{"role": "user", "content": "weather?"}]
    for _ in range(3):
        message = await say(client, messages, tools=[WEATHER])
        messages.append(message)
        if not message.tool_calls:
            return float(len(messages))
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            told = {"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}"}
            messages.append(told)
    return -1.0


async def way_back(client, _rest):
    """Call a tool, ask a sub-agent, and return to the conversation with the call."""
    messages = [{"role": "user", "content": "weather?"}]
    called = await say(client, messages, tools=[WEATHER])
    (call,) = called.tool_calls
    city = json.loads(call.function.arguments)["city"]
    told = {"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}"}
    await say(client, [{"role": "user", "content": "sub"}])
    return float(len((await say(client, [*messages, called, told], tools=[WEATHER])).content))
