"""Requests for chat and text completions in OpenAI's API (v1), limited to what a policy in training
can answer.

Source: the API reference, https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from april_rl.task.data.messages import ROLES, calls_of_tools
from april_rl.task.environments.door import MAX_DEPTH, MAX_STOP_CHARACTERS, MAX_STOPS, depth
from april_rl.task.environments.protocol import TEXT
from april_rl.types import Message

# Parameters that are ignored, because they would change the distribution that is trained, or do not
# change the response.
_IGNORED = frozenset(
    (
        *("model", "temperature", "top_p", "seed", "user", "store", "metadata"),
        *("parallel_tool_calls", "reasoning_effort", "verbosity", "prompt_cache_key"),
        *("service_tier", "safety_identifier"),
    )
)
# Parameters that are accepted only with these values.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
}
_ONLY_OF_CHAT = {"top_logprobs": (None, 0)}
_ONLY_OF_TEXT = {"best_of": (None, 1), "echo": (None, False), "suffix": (None, "")}
_READ = {"stop", "stream", "stream_options", "max_tokens", "logprobs"}
_READ_OF_CHAT = {"messages", "tools", "max_completion_tokens"}
_WISHES_OF_CHAT = {"tool_choice", "response_format"}  # the policy may follow them
_MAX_TOKENS_OF_TEXT = 16  # the API's default


class RefusedError(ValueError):
    """A request is refused; the message is for the author of the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked request. The prompt of a text completion is one message with the role TEXT."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()  # texts that end the response, which the agent does not read
    max_tokens: int = 0  # limit of the response; 0: the rest of the budget
    is_streamed: bool = False
    wants_usage: bool = field(default=False, compare=False)
    wants_logprobs: bool = field(default=False, compare=False)

    @property
    def is_text(self) -> bool:
        return bool(self.messages[0]["role"] == TEXT)

    @property
    def key(self) -> str:
        """Return a digest of the request; equal requests have the same digest."""
        asked = [self.messages, self.tools, self.stop, self.max_tokens]
        return hashlib.blake2b(
            json.dumps(asked, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    @classmethod
    def of_chat(cls, body: object) -> CompletionRequest:
        """Return the request in the body of a POST to chat/completions; raise RefusedError."""
        body = _check(body, {**_ONLY, **_ONLY_OF_CHAT}, _READ_OF_CHAT | _WISHES_OF_CHAT)
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages:
            raise RefusedError("messages must be a list of at least one message")
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RefusedError(f"tools={json.dumps(tools):.60} is not valid in the API")
        newer = body.get("max_completion_tokens")
        read = tuple(map(_message, messages))
        if depth([*read, *tools]) > MAX_DEPTH:
            raise RefusedError(f"messages and tools may be nested {MAX_DEPTH} levels deep")
        return cls(
            messages=read,
            tools=tuple(tools),
            **_common({**body, "max_tokens": newer} if newer is not None else body),
        )

    @classmethod
    def of_text(cls, body: object) -> CompletionRequest:
        """Return the request in the body of a POST to completions; raise RefusedError."""
        body = _check(body, {**_ONLY, **_ONLY_OF_TEXT}, {"prompt"})
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str) or not prompt:
            raise RefusedError("prompt must be one text that is not empty")
        if type(body.get("logprobs")) is int and body["logprobs"] > 0:
            raise RefusedError("logprobs above 0 is not supported: only sampled tokens have them")
        has_limit = body.get("max_tokens") is not None
        limit = body["max_tokens"] if has_limit else _MAX_TOKENS_OF_TEXT
        return cls(
            messages=({"role": TEXT, "content": prompt},), **_common({**body, "max_tokens": limit})
        )


def _check(body: object, only: Mapping[str, tuple[Any, ...]], read: set[str]) -> Mapping[str, Any]:
    """Return a body whose parameters are known; raise RefusedError."""
    if not isinstance(body, Mapping):
        raise RefusedError("the body must be a JSON object")
    for name, value in body.items():
        if name in only and value not in only[name]:
            least = json.dumps(only[name][-1])
            raise RefusedError(f"{name}={json.dumps(value):.60} is not supported, only {least}")
        if name not in only and name not in _IGNORED | _READ | read:
            raise RefusedError(f"{name} is not supported")
    try:
        json.dumps(dict(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"the request has half of a surrogate pair: {error}") from error
    return body


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    options, stop = body.get("stream_options") or {}, body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise RefusedError(f"stop={json.dumps(stop):.60} is not valid in the API")
    if len(stop) > MAX_STOPS or max(map(len, stop), default=0) > MAX_STOP_CHARACTERS:
        raise RefusedError(
            f"stop may have {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters"
        )
    limit = body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise RefusedError(f"max_tokens={json.dumps(limit):.60} must be a number of at least 1")
    return {
        "stop": tuple(stop),
        "max_tokens": limit or 0,
        "is_streamed": bool(body.get("stream")),
        "wants_usage": isinstance(options, Mapping) and bool(options.get("include_usage")),
        # For text completions, 0 asks for the log-probabilities of only the sampled tokens.
        "wants_logprobs": body.get("logprobs") is not None and body["logprobs"] is not False,
    }


def _message(given: object) -> Message:
    """Return a message as chat templates expect it, without null fields; raise RefusedError."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or role not in ROLES:
        raise RefusedError(f"{given!r:.80} is not a message; roles: {', '.join(ROLES)}")
    content = given.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
        if other := [kind for kind in kinds if kind != "text"]:
            raise RefusedError(f"content of type {other[0]!r:.40} is not supported, only text")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise RefusedError(f"content={content!r:.40} is not text")
    message = {key: value for key, value in given.items() if value is not None}
    calls = message.pop("tool_calls", [])
    try:
        called = {"tool_calls": calls_of_tools(calls, "a message")} if calls else {}
    except ValueError as error:
        raise RefusedError(str(error)) from error
    # Chat templates use the older name of the role.
    named = "system" if role == "developer" else role
    return {**message, "role": named, "content": content or "", **called}
