"""Tokens that end a response, and what a chat template writes after a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from april_rl.task.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from april_rl.types import Message

MARKER = "\N{BLACK DIAMOND}said\N{BLACK DIAMOND}"  # a text that no template contains
_TURN: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": MARKER},
]


def stop_token_ids(model_path: str, *, is_chat: bool = False) -> list[int]:
    """Return the end tokens of the model's generation config, else its tokenizer's; sorted.

    If `is_chat` and the chat template ends a turn with another token, that token ends a response
    too: base models name only the token that ends a text. Raise ValueError when neither file names
    an end token, because every response would run to its token budget.
    """
    try:
        named = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # no generation_config.json
        named = None
    if named is None:
        named = AutoTokenizer.from_pretrained(model_path).eos_token_id
    if named is None:
        raise ValueError(
            f"model.path: {model_path} names no end token, neither eos_token_id in "
            "generation_config.json nor eos_token of the tokenizer; add one of them"
        )
    found = {named} if isinstance(named, int) else set(named)
    if is_chat:
        ends = special_tokens_after_turn(load_tokenizer(model_path))
        found |= set() if found.intersection(ends) else set(ends[:1])
    return sorted(found)


def special_tokens_after_turn(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the chat template writes after a turn, in order, if any."""
    if not tokenizer.has_chat_template:
        return []
    try:
        text = text_after_marker(tokenizer, _TURN, {}, begins_turn=False)
    except TokenizerError:
        return []
    (token_ids,) = tokenizer.encode([text], add_special_tokens=False)
    return [token_id for token_id in token_ids if tokenizer.is_special(token_id)]


def text_after_marker(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    begins_turn: bool,
) -> str:
    """Return what the chat template writes after the marker; raise TokenizerError without it."""
    text = tokenizer.chat_text(messages, variables, begins_turn=begins_turn)
    _, marker, following = text.partition(MARKER)
    if not marker:
        raise TokenizerError(
            "the chat template does not write the text of a message as it is, so the text after a "
            "turn cannot be found"
        )
    return following
