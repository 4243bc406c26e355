"""Read a conversation from a column: messages in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from april_rl.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLES_OF_QUESTIONS = ("user", "tool")  # the policy speaks after a message of one of these roles


def has_role(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def conversation(items: list[Any]) -> tuple[Message, ...]:
    """Return a prompt's messages in one form; raise ValueError if the policy cannot answer them."""
    messages = tuple(_message(item, f"message {n}") for n, item in enumerate(items, start=1))
    last = messages[-1]["role"]
    if last == "assistant":
        raise ValueError(
            "ends with a message of the assistant, so the prompt would hold the answer; "
            "name the column with only the question, or leave that message out"
        )
    if last not in _ROLES_OF_QUESTIONS or not any(m["role"] == "user" for m in messages):
        raise ValueError(
            "has no question: the last message must be from the user or a tool, and one must be "
            f"from the user; here the last is from the {last}"
        )
    return messages


def place_of_question(messages: Sequence[Message]) -> int:
    return max(place for place, message in enumerate(messages) if message["role"] == "user")


def _message(item: Mapping[str, Any], name: str) -> Message:
    """Return one message without null fields; `name` is its name in errors."""
    message = {key: value for key, value in item.items() if value is not None}
    role, calls = message["role"], message.pop("tool_calls", None)
    if role not in ROLES:
        raise ValueError(
            f"{name} has the role {role!r}, which chat templates do not know; the roles are "
            f"{', '.join(ROLES)}"
        )
    content = message.setdefault("content", "" if calls else None)
    if not isinstance(content, str):
        raise ValueError(
            f"{name} ({role}) must have text as its content, got {type(content).__name__} "
            f"{str(content)[:60]}; images and other parts are not supported: write only the text"
        )
    if role in ("user", "assistant") and not (content.strip() or calls):
        raise ValueError(f"{name} ({role}) is empty")
    if calls and role != "assistant":
        raise ValueError(f"{name} ({role}) has tool_calls; only the assistant can call tools")
    return {**message, "tool_calls": calls_of_tools(calls, name)} if calls else message


def calls_of_tools(calls: Any, name: str) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return a message's calls with mappings as arguments; raise ValueError for an invalid call."""
    if not isinstance(calls, list):
        raise ValueError(f"{name}: tool_calls must be a list, got {str(calls)[:60]}")
    read = []
    for call in calls:
        given = _without_nulls(call)
        function = given.get("function", given) if isinstance(given, dict) else {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{name}: no function is named in the call {str(call)[:60]}")
        arguments = _arguments(function.get("arguments", {}), f"{name}: {function['name']}")
        known = {"id": given["id"]} if "id" in given else {}
        named = {"name": function["name"], "arguments": arguments}
        read.append({**known, "type": "function", "function": named})
    return read


def _arguments(given: object, name: str) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except ValueError as error:
            raise ValueError(
                f"{name} is called with arguments that are not JSON: {error}"
            ) from None
    if not isinstance(given, dict):
        raise ValueError(f"{name} is called with {str(given)[:60]}; arguments are a mapping")
    return given


def _without_nulls(value: object) -> Any:  # noqa: ANN401
    """Return a value without null fields, which a table adds when rows have different fields."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
