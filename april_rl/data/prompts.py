"""Rows to tokenized prompts: the template, and the filter for prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

from april_rl.config.choices import Template
from april_rl.config.task import PromptSetConfig
from april_rl.data.errors import DataError
from april_rl.data.procedural import PREFIX
from april_rl.data.rows import Row, load_procedural, load_rows
from april_rl.data.tokenizer import Tokenizer, TokenizerError
from april_rl.types import Prompt


class PromptTable(Sequence[Prompt]):
    """The prompts of one set that fit, in the order of the file, with ids 0 … n - 1."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        num_left_out: int,
        longest_tokens: int,
        summary: str = "",
    ) -> None:
        """`longest_tokens` is of all prompts, also of those left out as too long."""
        self._prompts = tuple(prompts)
        self.num_left_out, self.longest_tokens = num_left_out, longest_tokens
        self.summary = summary  # one line for people: what was read and what was left out

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptTable: ...
    def __getitem__(self, index: int | slice) -> Prompt | PromptTable:
        if isinstance(index, int):
            return self._prompts[index]
        return PromptTable(
            self._prompts[index],
            num_left_out=self.num_left_out,
            longest_tokens=self.longest_tokens,
            summary=self.summary,
        )


def load_prompts(
    chosen: PromptSetConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    max_prompt_tokens: int,
    dataset: str = "",
    seed: int = 0,
) -> PromptTable:
    """Return the prompts of the set that the setting `key` names; raises DataError.

    `dataset` is its name in `data.sources` or `evaluation.sets`; `seed` is of procedural tasks.
    """
    path = chosen.path
    if path.startswith(PREFIX):
        rows = load_procedural(path, key=key, split=chosen.split, args=chosen.args, seed=seed)
    else:
        rows = load_rows(
            path,
            key=key,
            split=chosen.split,
            prompt_column=chosen.prompt_column,
            answer_column=chosen.answer_column,
        )
    table = tokenize_prompts(
        rows,
        tokenizer,
        template=chosen.template,
        plain_template=chosen.plain_template,
        system_prompt=chosen.system_prompt,
        max_prompt_tokens=max_prompt_tokens,
    )
    return PromptTable(
        [replace(prompt, dataset=dataset) for prompt in table],
        num_left_out=table.num_left_out,
        longest_tokens=table.longest_tokens,
        summary=f"{path}: {len(table)} prompts, {table.num_left_out} left out as longer than "
        f"data.max_prompt_tokens={max_prompt_tokens} (the longest has {table.longest_tokens})",
    )


def tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    template: Template,
    plain_template: str,
    system_prompt: str,
    max_prompt_tokens: int,
) -> PromptTable:
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
    return PromptTable(
        [
            Prompt(
                id=place,
                token_ids=encoded[i],
                text=texts[i],
                answer=rows[i].answer,
                source=rows[i].source,
                columns=rows[i].columns,
            )
            for place, i in enumerate(fitting)
        ],
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
