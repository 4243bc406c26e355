"""Write the policy's turns as responses of OpenAI's API (v1), to chats and texts, streamed or not.

Source: the API reference, https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from april_rl.answers.extraction import after_thinking
from april_rl.task.environments.agent.chat import CompletionRequest
from april_rl.task.environments.protocol import TEXT, Turn
from april_rl.types import Message

_Object = dict[str, Any]


class ApiResponse(NamedTuple):
    """A response to a request."""

    turn: Turn
    message: Message  # the turn in the form that the agent reads
    name: str  # its id


def response_of(turn: Turn, request: CompletionRequest, *, name: str, number: int) -> ApiResponse:
    """Return a turn as a response; `number` counts the turns of the episode `name`."""
    kind = "cmpl" if request.is_text else "chatcmpl"
    return ApiResponse(turn, _message(turn, request, number=number), f"{kind}-{name}-{number}")


def _message(turn: Turn, request: CompletionRequest, *, number: int) -> Message:
    role = TEXT if request.is_text else "assistant"
    if not (request.tools and turn.calls):
        ends = (place for each in request.stop if (place := turn.text.find(each)) >= 0)
        return {"role": role, "content": turn.text[: min(ends, default=None)]}
    calls = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for place, call in enumerate(turn.calls)
    ]
    before = turn.text.partition("<tool_call>")[0].strip()
    return {"role": role, "content": before or None, "tool_calls": calls}


def added_messages(
    before: CompletionRequest, response: ApiResponse, asked: CompletionRequest
) -> tuple[Message, ...] | None:
    """Return the messages that a request adds to the last exchange; None if it changes that."""
    if asked.is_text != before.is_text or asked.tools != before.tools:
        return None
    if asked.is_text:
        # A text continues after all sampled tokens, and none of them may be an end token.
        text = asked.messages[0]["content"]
        whole = before.messages[0]["content"] + response.turn.text
        continues = (response.turn.is_truncated or response.turn.is_stopped) and text.startswith(
            whole
        )
        return ({"role": TEXT, "content": text[len(whole) :]},) if continues else None
    num_known = len(before.messages)
    again, added = asked.messages[: num_known + 1], asked.messages[num_known + 1 :]
    continues = (
        len(again) == num_known + 1
        and all(_is_same(*pair) for pair in zip(before.messages, again, strict=False))
        and _is_same(response.message, again[-1], ends=_ends(response, before))
    )
    has_turns = any(message["role"] == "assistant" for message in added)
    return added if continues and added and not has_turns else None


def body(response: ApiResponse, request: CompletionRequest) -> _Object:
    """Return the body of a response that is not streamed."""
    choice = {"index": 0, "finish_reason": _finish_reason(response, request)}
    choice["logprobs"] = _logprobs(response.turn, request)
    if request.is_text:
        choice["text"] = response.message["content"]
    else:
        choice["message"] = {**response.message, "refusal": None}
    usage = _usage(response.turn)
    return {**_head(response, request, is_streamed=False), "choices": [choice], "usage": usage}


def events(response: ApiResponse, request: CompletionRequest) -> list[_Object]:
    """Return the events of a streamed response: the whole text at once, and the end."""
    first: _Object = {"index": 0, "finish_reason": None}
    first["logprobs"] = _logprobs(response.turn, request)
    last: _Object = {"index": 0, "finish_reason": _finish_reason(response, request)}
    if request.is_text:
        first["text"], last["text"] = response.message["content"], ""
    else:
        calls = [{"index": i, **c} for i, c in enumerate(response.message.get("tool_calls", ()))]
        first["delta"] = {**response.message, **({"tool_calls": calls} if calls else {})}
        last["delta"] = {}
    head = _head(response, request, is_streamed=True)
    made = [{**head, "choices": [first]}, {**head, "choices": [last]}]
    if request.wants_usage:
        made.append({**head, "choices": [], "usage": _usage(response.turn)})
    return made


def _head(response: ApiResponse, request: CompletionRequest, *, is_streamed: bool) -> _Object:
    of_chat = "chat.completion.chunk" if is_streamed else "chat.completion"
    kind = "text_completion" if request.is_text else of_chat
    return {"id": response.name, "object": kind, "created": 0, "model": "policy"}


def _finish_reason(response: ApiResponse, request: CompletionRequest) -> str:
    if response.message.get("tool_calls"):
        return "tool_calls"
    is_cut = any(each in response.turn.text for each in request.stop)
    return "length" if response.turn.is_truncated and not is_cut else "stop"


def _logprobs(turn: Turn, request: CompletionRequest) -> _Object | None:
    """Return the log-probabilities of all sampled tokens, including those after a `stop`."""
    if not request.wants_logprobs:
        return None
    if request.is_text:
        starts = accumulate(map(len, turn.tokens[:-1]), initial=0)
        return {
            "tokens": list(turn.tokens),
            "token_logprobs": list(turn.logprobs),
            "text_offset": list(starts) if turn.tokens else [],
            "top_logprobs": None,
        }
    content = [_token(*pair) for pair in zip(turn.tokens, turn.logprobs, strict=True)]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> Mapping[str, object]:
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}


def _usage(turn: Turn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.num_context,
        "completion_tokens": turn.num_tokens,
        "total_tokens": turn.num_context + turn.num_tokens,
    }


def _ends(response: ApiResponse, request: CompletionRequest) -> list[str]:
    rest = response.turn.text.removeprefix(response.message["content"] or "")
    return [stop for stop in request.stop if rest.startswith(stop)]


def _is_same(ours: Message, theirs: Message, *, ends: Sequence[str] = ()) -> bool:
    """Return whether a message is repeated. Clients add and drop empty fields. In the
    assistant's messages an agent may leave out thoughts and the blanks around them, or add one
    of `ends`: the policy continues from its own tokens anyway.
    """
    if ours["role"] != "assistant":
        return _fields(ours) == _fields(theirs)
    first, again = _fields(ours), _fields(theirs)
    text, text_again = (str(message.pop("content", "")) for message in (first, again))
    whole = [text, *(text + end for end in ends)]
    readings = [*whole, *(after_thinking(each) or "" for each in whole)]
    return first == again and text_again.strip() in [each.strip() for each in readings]


def _fields(message: Message) -> dict[str, object]:
    """Return the fields of a message with tool calls as data: clients write them differently."""
    filled = {name: value for name, value in message.items() if value}
    return {**filled, "tool_calls": _calls(message)}


def _calls(message: Message) -> list[tuple[object, object]]:
    called = (call.get("function") or {} for call in message.get("tool_calls") or ())
    return [(each.get("name"), _parse(each.get("arguments"))) for each in called]


def _parse(arguments: object) -> object:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
