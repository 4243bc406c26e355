"""Rows to tokenized prompts: the template, and the filter for prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from april_rl.config.choices import Template
from april_rl.data.rows import DataError, Row
from april_rl.data.tokenizer import Tokenizer, TokenizerError
from april_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompts:
    """The prompts of a data set that fit, in the order of the file, with ids 0 … n - 1."""

    prompts: tuple[Prompt, ...]
    num_left_out: int  # longer than max_prompt_tokens
    longest_tokens: int  # of all prompts, also of those left out


def tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    template: Template,
    plain_template: str,
    system_prompt: str,
    max_prompt_tokens: int,
) -> TokenizedPrompts:
    """The rows as prompts of at most `max_prompt_tokens`; their text has the template around it.

    A chat template writes the special tokens itself; a plain one gets those the tokenizer puts at
    the start. Raises DataError for a row the template cannot take, for a prompt without tokens and
    when no prompt fits, TokenizerError for a missing chat template.
    """
    render = _renderer(
        tokenizer, template=template, plain_template=plain_template, system_prompt=system_prompt
    )
    texts = [_rendered(row, render) for row in rows]
    encoded = tokenizer.encode(texts, add_special_tokens=template is Template.plain)
    lengths = [len(token_ids) for token_ids in encoded]
    _check_tokens(lengths, rows)
    fitting = [i for i, length in enumerate(lengths) if length <= max_prompt_tokens]
    if not fitting:
        raise DataError(
            f"data.max_prompt_tokens={max_prompt_tokens} leaves out all {len(rows)} prompts, from "
            f"{rows[0].source} on; the shortest has {min(lengths)} tokens"
        )
    return TokenizedPrompts(
        prompts=tuple(
            Prompt(
                id=place,
                token_ids=encoded[i],
                text=texts[i],
                answer=rows[i].answer,
                source=rows[i].source,
            )
            for place, i in enumerate(fitting)
        ),
        num_left_out=len(rows) - len(fitting),
        longest_tokens=max(lengths),
    )


def _check_tokens(lengths: Sequence[int], rows: Sequence[Row]) -> None:
    """Raise DataError with the first prompt that has no tokens, and how many there are."""
    without = [row.source for row, length in zip(rows, lengths, strict=True) if not length]
    if without:
        raise DataError(
            f"{without[0]}: the tokenizer finds no token in this prompt; so it is with "
            f"{len(without)} of {len(rows)} prompts. A folder given as model.path must hold the "
            "tokenizer's files too"
        )


def _renderer(
    tokenizer: Tokenizer, *, template: Template, plain_template: str, system_prompt: str
) -> Callable[[Row], str]:
    """How a row becomes text; raises ValueError when the settings do not go together."""
    if template is Template.chat:
        if not tokenizer.has_chat_template:
            tokenizer.chat_text([])  # raises with the advice
        return lambda row: tokenizer.chat_text(_messages(row, system_prompt))
    if system_prompt:
        raise DataError(
            "data.system_prompt works with data.template=chat only; "
            "write it into data.plain_template"
        )
    return lambda row: _plain_text(row, plain_template)


def _rendered(row: Row, render: Callable[[Row], str]) -> str:
    """The row's text; a refusal of the template names the row."""
    try:
        return render(row)
    except TokenizerError as error:
        raise DataError(f"{row.source}: {error}") from error


def _messages(row: Row, system_prompt: str) -> list[dict[str, str]]:
    """The row as a chat, with the system prompt in front when there is one."""
    if isinstance(row.prompt, str):
        messages = [{"role": "user", "content": row.prompt}]
    else:
        messages = [dict(message) for message in row.prompt]
    if not system_prompt:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            f"{row.source}: the row has a system message of its own and data.system_prompt is set; "
            "leave one of them out"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def _plain_text(row: Row, plain_template: str) -> str:
    """The template with the prompt in it."""
    if not isinstance(row.prompt, str):
        raise DataError(
            f"{row.source}: the prompt is a list of chat messages; "
            "data.template=plain takes text only"
        )
    return plain_template.replace("{prompt}", row.prompt)
