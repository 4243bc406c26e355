"""Check the return values of environments, agents and tools in their own process, and convert
them to plain values, which can be pickled, encoded, tokenized and saved. Anything else fails the
sample, with a sentence that names the field.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, SupportsIndex

from april_rl.task.data.messages import calls_of_tools
from april_rl.task.environments.protocol import StepResult
from april_rl.types import Message

MAX_DEPTH = 32  # depth of nested lists and mappings; pickle and templates recurse
# The API's limit, since every token is searched for each text.
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
CHARACTERS_PER_TOKEN = 64  # hardly any token is longer


class GarbageError(TypeError):
    """A method returned something that cannot be used."""


def opening(returned: object, *, max_tokens: int) -> StepResult:
    """Return what `reset` returned in one form: text, messages, None or the StepResult of an agent.

    `max_tokens` is environment.max_observation_tokens: text that certainly exceeds it is cut, so
    that a huge text is never tokenized. Raise GarbageError.
    """
    if not isinstance(returned, StepResult):
        returned = StepResult(messages=() if returned is None else returned)  # type: ignore[arg-type]
    if returned.is_final:
        raise GarbageError("reset returned is_final=True, expected messages for the policy")
    return _check("reset", returned, max_tokens=max_tokens)


def result(returned: object, *, max_tokens: int) -> StepResult:
    """Return the result of `step` in one form; `max_tokens` as in `opening`. Raise GarbageError."""
    if not isinstance(returned, tuple) or not 3 <= len(returned) <= len(StepResult._fields):
        raise GarbageError(f"step returned {_show(returned)}, expected a StepResult")
    return _check("step", StepResult(*returned), max_tokens=max_tokens)


def repair(text: str) -> str:
    """Return an encodable text: surrogate pairs are joined, single halves become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def depth(value: object) -> int:
    """Return how deep lists and mappings are nested in plain data."""
    found, level = 0, [value]
    while level:
        inner = list({id(v): v for v in level if isinstance(v, (Mapping, list, tuple))}.values())
        level = [x for v in inner for x in (v.values() if isinstance(v, Mapping) else v)]
        if not inner or found > MAX_DEPTH:
            return found
        found += 1
    return found


def _check(method: str, given: StepResult, *, max_tokens: int) -> StepResult:
    def field(name: str, check: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        value = given._asdict()[name]
        try:
            return check(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise GarbageError(f"{method} returned {name}={_show(value)}: {error}") from error

    return StepResult(
        messages=_cut(field("messages", _messages), max_tokens * CHARACTERS_PER_TOKEN),
        reward=field("reward", _finite),
        is_final=field("is_final", _flag),
        tools=field("tools", _schemas),
        begins_context=field("begins_context", _flag),
        max_turn_tokens=field("max_turn_tokens", _count),
        stop=field("stop", _stops),
        request_key=field("request_key", _text),
    )


def _messages(value: object) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": repair(value)}] if value else []
    given = [value] if isinstance(value, Mapping) or not isinstance(value, Sequence) else value
    return list(map(_message, given))


def _message(value: object) -> Message:
    role = value.get("role") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(role, str):
        raise TypeError("expected text, or a list of messages with role and content")
    content = value.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise TypeError(f"the content of a message must be text, got {_show(content)}")
    calls = value.get("tool_calls")
    called = {"tool_calls": calls_of_tools(calls, "the message")} if calls else {}
    message: Message = _plain({**value, **called})
    return message


def _plain(value: object) -> Any:  # noqa: ANN401
    """Return plain data for JSON, without the user's classes and with encodable texts."""
    if depth(value) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return json.loads(repair(json.dumps(value, ensure_ascii=False, allow_nan=False)))


def _schemas(value: object) -> tuple[Mapping[str, Any], ...]:
    value = () if value is None else value
    if not isinstance(value, Sequence) or not all(isinstance(each, Mapping) for each in value):
        raise TypeError("expected a list of JSON schemas")
    return tuple(_plain(dict(each)) for each in value)


def _stops(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_STOPS:
        raise TypeError(f"expected a list of at most {MAX_STOPS} texts")
    for each in value:
        if not isinstance(each, str) or not 0 < len(each) <= MAX_STOP_CHARACTERS:
            raise TypeError(f"expected texts of 1 to {MAX_STOP_CHARACTERS} characters")
        each.encode()
    return tuple(map(str, value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return repair(str(value))


def _finite(value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError("expected a finite number")
    return float(value)


def _flag(value: object) -> bool:
    if value is None or isinstance(value, (str, bytes, Sequence, Mapping)):
        raise TypeError("expected true or false")
    return bool(value)


def _count(value: SupportsIndex) -> int:
    count = operator.index(value)
    if count < 0:
        raise ValueError("expected 0 or more tokens")
    return count


def _cut(messages: list[Message], room: int) -> list[Message]:
    """Return messages with at most `room` characters of texts and calls; drop what follows."""
    kept: list[Message] = []
    for message in messages:
        size = len(message.get("content") or "") + len(json.dumps(message.get("tool_calls", "")))
        if size > room:
            text = message.get("content")
            if not isinstance(text, str):
                raise GarbageError(f"a message has {size} characters, more than the policy reads")
            return [*kept, {**message, "content": text[: max(room, 1)]}]
        kept.append(message)
        room -= size
    return kept


def _show(value: object) -> str:
    try:
        return repair(f"{value!r:.80}")
    except Exception as error:  # a user's class may raise anything when it is shown
        return f"{type(value).__name__}, which cannot be shown: {type(error).__name__}"
