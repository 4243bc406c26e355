"""The prompts of a set: a table that is read once and stays outside Python's heap."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from april_rl.config.task import TASK_PREFIX, PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.rendering import EXTRA
from april_rl.task.data.tokenized import TableMaker, TokenizedTable
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.types import Prompt

_MANY_UNKNOWN = 0.05  # share of unknown tokens above which the user gets a note
_SHOWN_CHARACTERS = 200  # length of the example


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptTable(Sequence[Prompt]):
    """The prompts of one set that are short enough, with ids 0 … n - 1, made on access."""

    tokenized: TokenizedTable
    places: NDArray[np.int64]  # rows of the prompts in it [prompts]
    path: str  # the source as the settings name it
    dataset: str
    summary: str  # one line for people: how many rows were read and left out
    notes: tuple[str, ...]  # for people: columns that are not read, tokens that are unknown
    has_environment: bool
    has_agent: bool

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the source, with duplicates and too long prompts."""
        return self.tokenized.num_rows

    @property
    def num_duplicates(self) -> int:
        """Return the number of rows left out as duplicates (same prompt and answer)."""
        return self.num_rows - len(self.tokenized.lengths)

    @property
    def all_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each distinct prompt [rows], even if it is too long."""
        return self.tokenized.lengths

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each prompt [prompts]."""
        return self.tokenized.lengths[self.places]

    @property
    def source_rows(self) -> list[int]:
        """Return the index of each prompt's row in the source, which counts from 0 [prompts]."""
        rows = self.tokenized.table.data.column("place").to_numpy()[self.places]
        return [int(row) for row in rows]

    @property
    def fingerprint(self) -> str:
        """Return a hash of the tokens and answers of all prompts, in order."""
        digest = xxhash.xxh3_128(self.tokenized.fingerprint.encode())
        digest.update(self.places.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptTable: ...
    def __getitem__(self, index: int | slice) -> Prompt | PromptTable:
        if isinstance(index, slice):
            return replace(self, places=self.places[index])
        row = self.tokenized.table[int(self.places[index])]
        return Prompt(
            id=range(len(self))[index],
            # The agent writes everything that the policy reads.
            token_ids=() if self.has_agent else tuple(row["token_ids"]),
            text=row["text"],
            answer=row["answer"],
            source=self.tokenized.names.name(row["place"]),
            dataset=self.dataset,
            columns={k.removeprefix(EXTRA): v for k, v in row.items() if k.startswith(EXTRA)},
            has_environment=self.has_environment,
        )


def load_prompts(
    chosen: PromptSetConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    max_prompt_tokens: int,
    dataset: str = "",
    columns: Collection[str] = (),
    deduplicate: bool = True,
    seed: int = 0,
    has_agent: bool = False,
) -> PromptTable:
    """Return the prompts of the set that the setting `key` names; raises DataError and
    TokenizerError.

    `columns` are data columns to keep in `Prompt.columns` (`entry` of a procedural task is always
    kept); `seed` draws the rows of procedural tasks. With `has_agent` prompts of a set with an
    environment are questions for an agent: text without a chat template, and no tokens. A large
    table is stored in the Hugging Face cache, where the next start with the same content, settings
    and tokenizer finds it.
    """
    has_agent &= chosen.environment
    if has_agent:
        if chosen.system_prompt:
            raise DataError(
                f"{key}={chosen.path}: system_prompt has no effect on an agent, which writes the "
                "messages itself: remove it"
            )
        chosen = replace(chosen, template="plain", chat_template_kwargs={})
    is_procedural = chosen.path.startswith(TASK_PREFIX)
    tokenized = TableMaker(
        chosen=chosen,
        tokenizer=tokenizer,
        key=key,
        columns={*columns, "entry"} if is_procedural else set(columns),
        deduplicate=deduplicate,
        seed=seed,
    ).table()
    _check_tokens(tokenized)
    places = np.flatnonzero(tokenized.lengths <= max_prompt_tokens)
    if not len(places):
        raise DataError(
            f"data.max_prompt_tokens={max_prompt_tokens} leaves out all {len(tokenized.lengths)} "
            f"prompts, from {_source(tokenized, 0)} on; the shortest has "
            f"{tokenized.lengths.min()} tokens"
        )
    return PromptTable(
        tokenized=tokenized,
        places=places,
        path=chosen.path,
        dataset=dataset,
        summary=f"{chosen.path}: {_counts(tokenized, len(places), limit=max_prompt_tokens)}",
        notes=tuple(_notes(chosen.path, tokenized, tokenizer)),
        has_environment=chosen.environment,
        has_agent=has_agent,
    )


def _counts(tokenized: TokenizedTable, num_prompts: int, *, limit: int) -> str:
    num_distinct = len(tokenized.lengths)
    num_duplicates = tokenized.num_rows - num_distinct
    duplicates = (
        f" of {tokenized.num_rows:,} rows, {num_duplicates:,} duplicates (the same prompt and "
        "answer)"
        if num_duplicates
        else ""
    )
    return (
        f"{num_prompts:,} prompts{duplicates}, {num_distinct - num_prompts:,} left out as longer "
        f"than data.max_prompt_tokens={limit} (the longest has {tokenized.lengths.max()})"
    )


def _notes(path: str, tokenized: TokenizedTable, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield notes on columns that are not read, and one if many tokens are unknown."""
    yield from (f"{path}: {note}" for note in tokenized.notes)
    if tokenized.unknown_frac <= _MANY_UNKNOWN:
        return
    row = tokenized.unknown_row
    seen = tokenizer.show_text(tokenized.table[row]["token_ids"])[:_SHOWN_CHARACTERS]
    yield (
        f"{path}: {tokenized.unknown_frac:.0%} of the tokens of these prompts are unknown to the "
        f"model, which reads {_source(tokenized, row)} as {seen!r}; use prompts that it can read, "
        "or another model.path"
    )


def _check_tokens(tokenized: TokenizedTable) -> None:
    without = np.flatnonzero(tokenized.lengths == 0)
    if len(without):
        raise DataError(
            f"{_source(tokenized, int(without[0]))}: the tokenizer makes no token of this prompt "
            f"({len(without)} of {len(tokenized.lengths)} prompts are like it). A folder given as "
            "model.path must hold the tokenizer's files too"
        )


def _source(tokenized: TokenizedTable, row: int) -> str:
    return tokenized.names.name(tokenized.table[row]["place"])
