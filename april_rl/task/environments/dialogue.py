"""Turns the messages of an environment into the tokens that follow a prompt or a turn.

Sampled tokens are never decoded and encoded again. The tokens after them come from the chat
template: a stand-in conversation with a marker in the place of the tokens so far is rendered,
and the text after the marker is new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from april_rl.task.data.stop_tokens import MARKER, text_after_marker
from april_rl.task.data.tokenizer import Tokenizer, TokenizerError
from april_rl.task.environments.door import MAX_DEPTH, depth
from april_rl.task.environments.protocol import TEXT, ToolCall, Turn
from april_rl.types import Message

_QUESTION: Message = {"role": "user", "content": MARKER}
_ASKED: Message = {"role": "user", "content": "?"}
# For templates that refuse a tool message unless a call precedes it.
_CALL = {"type": "function", "function": {"name": "tool", "arguments": {}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """The form in which a data set's prompts and turns continue."""

    tokenizer: Tokenizer
    is_chat: bool  # False: the text of messages is appended unchanged
    variables: Mapping[str, Any]  # data.chat_template_kwargs
    stop_ids: frozenset[int]  # tokens that end a turn
    has_tools: bool = False  # turns may contain calls of tools
    # The agent's messages are the whole conversation, and prompts have no tokens.
    has_agent: bool = False

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the tokens between a prompt, which ends with the user's message, and the first
        turn; an agent may declare `tools`. Raise TokenizerError as `conversation` does.
        """
        if self.has_agent:
            return self.conversation(messages, tools)
        if not self.is_chat:
            return self._encode(_plain(messages))
        closing = self._after_marker([_QUESTION], begins_turn=False)
        following = self._after_marker([_QUESTION, *messages], begins_turn=True)
        if not following.startswith(closing):
            raise TokenizerError(
                "the chat template changes a message when another follows it, from "
                f"{closing!r:.40} to {following!r:.40}: a conversation cannot be continued"
            )
        return self._encode(following.removeprefix(closing))

    def following(self, messages: Sequence[Message], *, is_cut: bool = False) -> tuple[int, ...]:
        """Return the tokens between a turn that has ended with a stop token, or was cut off before
        one, and the next turn. Raise TokenizerError for messages that the template refuses.
        """
        if not self.is_chat or _is_text(messages):
            return self._encode(_plain(messages))
        turn: Message = {"role": "assistant", "content": MARKER}
        try:
            text = self._after_marker([_ASKED, turn, *messages], begins_turn=True)
        except TokenizerError:
            turn = {**turn, "tool_calls": [_CALL]}
            text = self._after_marker([_ASKED, turn, *messages], begins_turn=True)
        token_ids = self._encode(text)
        ends = [place for place, token_id in enumerate(token_ids) if token_id in self.stop_ids]
        if not ends:
            raise TokenizerError(
                f"the chat template writes {text!r:.60} after a turn, which holds none of the "
                "tokens that end a turn (eos_token_id in generation_config.json), so the end of "
                "a turn cannot be found; add the token that the template writes there"
            )
        return token_ids[ends[0] + (not is_cut) :]

    def turn_of(self, text: str) -> tuple[int, ...]:
        return (*self._encode(text), min(self.stop_ids))

    def turn(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] = (),
        *,
        is_truncated: bool,
        is_last: bool,
        num_context: int = 0,
    ) -> Turn:
        """Return a turn of the policy, after `num_context` tokens, as text with its tool calls; a
        turn that was cut off has no calls. `logprobs` [R of the turn] are for agents.
        """
        is_ended = bool(token_ids) and token_ids[-1] in self.stop_ids
        turn = Turn(
            text=self.tokenizer.decode(token_ids),
            raw_text=self.tokenizer.show_text(token_ids[:-1] if is_ended else token_ids),
            is_truncated=is_truncated,
            is_stopped=not (is_ended or is_truncated),
            is_last=is_last,
            num_tokens=len(token_ids),
            num_context=num_context,
        )
        if self.has_agent:
            tokens = tuple(self.tokenizer.show_text([token_id]) for token_id in token_ids)
            turn = turn._replace(tokens=tokens, logprobs=tuple(logprobs))
        if not self.has_tools or is_truncated:
            return turn
        try:
            calls = tuple(map(_call, self.tokenizer.tool_calls(turn.raw_text)))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            return turn._replace(fault=f"the call cannot be read: {reason}")
        return turn._replace(calls=calls)

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """Return a whole conversation as tokens; raise TokenizerError if it cannot be written."""
        if tools and not (self.is_chat and self.has_tools):
            raise TokenizerError(
                "the agent declares tools, but this model's tool calls cannot be parsed: set "
                "data.template=chat and a response_template in tokenizer_config.json"
            )
        if not self.is_chat or _is_text(messages):
            return self.tokenizer.encode([_plain(messages)], add_special_tokens=True)[0]
        given = {"tools": list(tools)} if tools else {}
        self.tokenizer.check_chat(given)
        return self._encode(self.tokenizer.chat_text(messages, {**self.variables, **given}))

    def _after_marker(self, messages: Sequence[Message], *, begins_turn: bool) -> str:
        return text_after_marker(self.tokenizer, messages, self.variables, begins_turn=begins_turn)

    def _encode(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode([text], add_special_tokens=False)[0] if text else ()


def _call(read: Any) -> ToolCall:  # noqa: ANN401
    function = read.get("function") if isinstance(read, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"it names no function: {read!r:.80}")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"the arguments of {function['name']} must be a mapping: {arguments!r:.60}"
        )
    if depth(arguments) > MAX_DEPTH:
        raise ValueError(
            f"the arguments of {function['name']} are nested more than {MAX_DEPTH} deep"
        )
    json.dumps(arguments, allow_nan=False)  # raises ValueError for numbers that JSON lacks
    return ToolCall(function["name"], dict(arguments))


def _plain(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


def _is_text(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == TEXT
