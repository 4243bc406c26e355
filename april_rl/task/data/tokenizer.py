"""The model's tokenizer: text to token ids, messages to text, token ids to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from jinja2 import TemplateError
from tokenizers.models import BPE
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from april_rl.errors import RunError
from april_rl.task.data.decoder import BackendDecoder
from april_rl.types import Message

# How Hermes, Qwen2.5, Qwen3 and others write tool calls, for transformers' `parse_response`.
_JSON_CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


class TokenizerError(RunError, ValueError):
    """Raised when the tokenizer cannot be loaded or lacks what the configuration needs."""


class Tokenizer:
    """A Hugging Face tokenizer behind the few operations that are needed; pickled as its path."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, path: str) -> None:
        self._tokenizer = tokenizer
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], Tokenizer], tuple[str]]:
        return load_tokenizer, (self._path,)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def check_chat(self, template_kwargs: Mapping[str, Any]) -> None:
        """Raise TokenizerError unless a chat template reads every one of `template_kwargs`."""
        if not self.has_chat_template:
            raise TokenizerError(
                f"data.template=chat needs a chat template, but the tokenizer of model.path="
                f"{self._path} has none; use data.template=plain, or a model with a chat template"
            )
        template = str(self._tokenizer.chat_template)
        if "tools" in template_kwargs and not re.search(r"\btools\b", template):
            raise TokenizerError(
                f"the environment has tools, but the chat template of model.path={self._path} does "
                "not show tools to the model"
            )
        unread = [name for name in template_kwargs if not re.search(rf"\b{name}\b", template)]
        if unread:
            raise TokenizerError(
                f"data.chat_template_kwargs: {', '.join(unread)} has no effect: the chat template "
                f"of model.path={self._path} does not read it; remove it"
            )

    def chat_text(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        begins_turn: bool = True,
    ) -> str:
        """Return the messages as the model sees them, with or without the start of its own turn.
        Raise TokenizerError without a chat template, or when it refuses these messages.
        """
        self.check_chat({})
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=begins_turn,
                **(template_kwargs or {}),
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TokenizerError(
                f"the chat template of model.path={self._path} refuses the messages: {error}. "
                "Change the messages, or set data.template=plain"
            ) from error
        return str(text)

    @property
    def has_tool_calls(self) -> bool:
        return self._call_form() is not None

    def check_tool_calls(self) -> None:
        """Raise TokenizerError unless `has_tool_calls`."""
        if not self.has_tool_calls:
            raise TokenizerError(
                f"the tool calls of model.path={self._path} cannot be parsed: its "
                "tokenizer_config.json has no response_template (which transformers' "
                "PreTrainedTokenizerBase.parse_response reads), and its chat template shows no "
                "<tool_call> with JSON; add a response_template"
            )

    def tool_calls(self, text: str) -> Sequence[Any]:
        """Return the tool calls of a turn, except in its thoughts; raise ValueError if one cannot
        be read.
        """
        form, said = self._call_form() or {}, _without_thoughts(text)
        anchor = form.get("start_anchor", "")  # where a turn begins, after its thoughts
        prefix = anchor if isinstance(anchor, str) else anchor[0]
        parsed = self._tokenizer.parse_response(said, schema=form, prefix=prefix)
        found: Sequence[Any] = parsed.get("tool_calls") or ()
        return found

    def _call_form(self) -> dict[str, Any] | None:
        given: dict[str, Any] | None = self._tokenizer.response_template
        template = str(self._tokenizer.chat_template)
        is_json = "<tool_call>" in template and "<function=" not in template
        return given or (_JSON_CALLS if is_json else None)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """Return the token ids of each text; the tokens that begin a text are never doubled."""
        if not texts:
            return []
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )
        texts_ids = [tuple(ids) for ids in encoded["input_ids"]]
        start = self._start_ids if add_special_tokens else ()
        is_twice = [start and ids[: 2 * len(start)] == start * 2 for ids in texts_ids]
        return [
            ids[len(start) :] if twice else ids
            for ids, twice in zip(texts_ids, is_twice, strict=True)
        ]

    @cached_property
    def _start_ids(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer puts before a text."""
        bare = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self._tokenizer("a")["input_ids"]
        places = range(len(whole) - len(bare) + 1)
        first = next((at for at in places if whole[at : at + len(bare)] == bare), 0)
        return tuple(whole[:first])

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the token that ends a text, if there is one."""
        found: int | None = self._tokenizer.eos_token_id
        return () if found is None else (found,)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token belongs to the form of a text rather than to its content."""
        if token_id in (self._tokenizer.unk_token_id, self._tokenizer.bos_token_id):
            return token_id in self.end_ids
        added = self._tokenizer.added_tokens_decoder.get(token_id)
        is_added = added is not None and bool(added.special)
        return is_added or token_id in self._tokenizer.all_special_ids

    def fingerprint(self) -> str:
        """Return a digest of what decides text and tokens: vocabulary, rules, chat template."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            rules = tokenizer.backend_tokenizer.to_str()
        else:
            rules = f"{type(tokenizer).__name__} {sorted(tokenizer.get_vocab().items())}"
        return xxhash.xxh3_128_hexdigest(f"{rules}{tokenizer.chat_template}".encode())

    @property
    def unknown_id(self) -> int | None:
        """Return the token for unknown text; None if there is none, or it also marks an end."""
        found: int | None = self._tokenizer.unk_token_id
        ends = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        return None if found in ends else found

    @property
    def num_tokens(self) -> int:
        return len(self._tokenizer)

    def spread_ids(self, number: int) -> list[int]:
        """Return every added token, such as <think>, and about `number` ids of the whole range."""
        spread = range(0, self.num_tokens, max(1, self.num_tokens // number))
        return sorted({*spread, *self._tokenizer.added_tokens_decoder})

    def show_text(self, token_ids: Sequence[int]) -> str:
        """Return the tokens of a prompt as text, with special and unknown tokens shown by name."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Return `decode` for other processes, if possible without importing transformers."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, PreTrainedTokenizerFast) and _adds_nothing(tokenizer):
            return BackendDecoder(tokenizer.backend_tokenizer)
        return self.decode


def _without_thoughts(text: str) -> str:
    """Return the text after a turn's thoughts, which may begin in the prompt or may not end."""
    before, closed, after = text.partition("</think>")
    return after if closed else before.partition("<think>")[0]


def _adds_nothing(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the tokenizers library alone decodes identically."""
    if (
        type(tokenizer).decode is not PreTrainedTokenizerBase.decode
        or type(tokenizer)._decode is not PreTrainedTokenizerFast._decode
    ):
        return False
    if not tokenizer.clean_up_tokenization_spaces:
        return True
    # Many BPE checkpoints set this flag although transformers ignores it for them.
    return (
        isinstance(tokenizer.backend_tokenizer.model, BPE)
        and not tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    )


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a folder or a hub id, also from the cache; raise TokenizerError."""
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(path), path=path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TokenizerError(
            f"model.path={path}: cannot load the tokenizer: {reason} (give a folder with a Hugging "
            "Face model, or a hub id that is reachable or cached)"
        ) from error
