"""The chat completions of OpenAI's API (v1), as far as a policy in training can give them.

Source: the API reference, https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from april_rl.environments.protocol import Turn
from april_rl.types import Message

# Parameters that are accepted and ignored: they would change the distribution that is trained, or
# do not concern the answer.
_IGNORED = frozenset(
    (
        *("model", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "user"),
        *("stream", "stream_options", "store", "metadata", "parallel_tool_calls"),
        *("reasoning_effort", "verbosity", "prompt_cache_key", "service_tier", "top_logprobs"),
        "safety_identifier",
    )
)
# Parameters that are accepted with these values only.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_READ = {"messages", "tools", "stop"}


class RefusedError(ValueError):
    """A request cannot be answered; the message is for the agent's author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request, checked."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()  # the agent reads an answer up to the first of these
    is_streamed: bool = False
    wants_usage: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, body: object) -> ChatRequest:
        """Return the request in the body of a POST; raise RefusedError."""
        if not isinstance(body, Mapping):
            raise RefusedError("the body must be a JSON object")
        for name, value in body.items():
            if name in _ONLY and value not in _ONLY[name]:
                least = json.dumps(_ONLY[name][-1])
                raise RefusedError(f"{name}={json.dumps(value):.60} is not supported, only {least}")
            if name not in _ONLY and name not in _IGNORED | _READ:
                raise RefusedError(f"{name} is not supported")
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages:
            raise RefusedError("messages must be a list with at least one message")
        options, stop = body.get("stream_options") or {}, body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        for name, values, kind in (("tools", tools, Mapping), ("stop", stop, str)):
            if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
                raise RefusedError(f"{name}={json.dumps(values):.60} is not valid in the API")
        return cls(
            messages=tuple(map(_message, messages)),
            tools=tuple(tools),
            stop=tuple(stop),
            is_streamed=bool(body.get("stream")),
            wants_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        )


def added_messages(history: Sequence[Message], asked: Sequence[Message]) -> tuple[Message, ...]:
    """Return what a request adds to the conversation up to the last answer; nothing if it does not
    go on from there.
    """
    before, added = asked[: len(history)], tuple(asked[len(history) :])
    goes_on = len(before) == len(history) and all(map(_is_same, history, before))
    return () if any(message["role"] == "assistant" for message in added) or not goes_on else added


def answer_message(turn: Turn, request: ChatRequest, *, number: int) -> Message:
    """Return a turn as the message of the assistant; `number` counts the turns of the episode."""
    if not (request.tools and turn.calls):
        ends = (place for each in request.stop if (place := turn.text.find(each)) >= 0)
        return {"role": "assistant", "content": turn.text[: min(ends, default=None)]}
    calls = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for place, call in enumerate(turn.calls)
    ]
    before = turn.text.partition("<tool_call>")[0].strip()
    return {"role": "assistant", "content": before or None, "tool_calls": calls}


def completion(turn: Turn, message: Message, *, name: str) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    return {
        "id": name,
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {**message, "refusal": None},
                "logprobs": None,
                "finish_reason": _finish_reason(turn, message),
            }
        ],
        "usage": _usage(turn),
    }


def chunks(turn: Turn, message: Message, *, name: str, wants_usage: bool) -> list[dict[str, Any]]:
    """Return the events of a streamed answer: all of it at once, and its end."""
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    base = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": "policy"}
    last = {"index": 0, "delta": {}, "finish_reason": _finish_reason(turn, message)}
    events: list[dict[str, Any]] = [
        {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**base, "choices": [last]},
    ]
    return [*events, {**base, "choices": [], "usage": _usage(turn)}] if wants_usage else events


def _finish_reason(turn: Turn, message: Message) -> str:
    if turn.is_truncated:
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.num_context,
        "completion_tokens": turn.num_tokens,
        "total_tokens": turn.num_context + turn.num_tokens,
    }


def _message(given: object) -> Message:
    """Return a message whose content is text; raise RefusedError."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or role not in _ROLES:
        raise RefusedError(f"{given!r:.80} is no message with a role of {', '.join(_ROLES)}")
    content = given.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
        if other := [kind for kind in kinds if kind != "text"]:
            raise RefusedError(f"content of type {other[0]!r:.40} is not supported, only text")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise RefusedError(f"content={content!r:.40} is no text")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RefusedError(f"tool_calls={calls!r:.40} is not valid in the API")
    try:
        json.dumps(dict(given), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"the message holds half a character: {error}") from error
    # Chat templates know the older name.
    return {**given, "role": "system" if role == "developer" else role, "content": content}


def _is_same(ours: Message, theirs: Message) -> bool:
    """Return whether a message is repeated. Clients add and drop empty fields. Of an answer an
    agent may leave out thoughts or blanks, or add the `stop` at which it was cut: the policy goes
    on from what it sampled.
    """
    said, again = (message.get("content") or "" for message in (ours, theirs))
    is_answer = ours["role"] == "assistant"
    is_kept = again.strip() in said or said.strip() in again if is_answer else said == again
    return is_kept and ours["role"] == theirs["role"] and _calls(ours) == _calls(theirs)


def _calls(message: Message) -> list[tuple[object, object]]:
    called = (call.get("function") or {} for call in message.get("tool_calls") or ())
    return [(each.get("name"), _parsed(each.get("arguments"))) for each in called]


def _parsed(arguments: object) -> object:
    """Return arguments as data: clients may write them anew."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
