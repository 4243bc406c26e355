"""The page of a data set: rows, duplicates, lengths, prompts, overlap, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from april_rl.config import TrainConfig
from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.lab.attack.attack import pay_by
from april_rl.lab.rehearsal.copied_rows import UnwritableError, copy_rows
from april_rl.lab.rehearsal.decontamination import Overlap, Passages
from april_rl.lab.rehearsal.inspection import FormsTried, forms_lines, try_forms
from april_rl.lab.rehearsal.stand_ins import Loader, NamedSet
from april_rl.lab.report.html import shorten
from april_rl.task.data.prompts import PromptTable
from april_rl.task.environments.loading import describe
from april_rl.task.rewards.check import check_tests, reads_answers
from april_rl.types import Prompt

_BARS, _BAR_WIDTH = 12, 40
_NO_SETS = "overlap: no evaluation sets are named ('+evaluation.sets.NAME={path: ...}')"
_NUM_RENDERED, _NUM_SHOWN_OVERLAPS = 3, 3


class _Loaded(NamedTuple):
    """A set that a run trains on."""

    wanted: NamedSet  # with the rows that were read
    table: PromptTable
    overlaps: frozenset[int]  # indices of prompts that an evaluation set has, too


class DataPage:
    """Pages about the sets that a configuration trains on."""

    def __init__(self, config: TrainConfig, *, say: Callable[[str], None]) -> None:
        """Write to `say`, one part at a time."""
        self._config, self._say = config, say
        is_agent = describe(config.environment, config.user_code).is_agent
        self._loader = Loader(config, say, has_agent=is_agent)
        self._sets: list[_Loaded] = []

    def show(self) -> None:
        """Load every set and print its page. Raise RunError."""
        loader = self._loader
        with loader.rewards() as rewards:
            held_out = {
                wanted.name: loader.load(wanted, rewards.columns_of(wanted.name))[0]
                for wanted in loader.held_out_sets()
            }
            for wanted in loader.training_sets():
                table, chosen = loader.load(wanted, rewards.columns_of(wanted.name))
                is_stated = reads_answers(rewards, wanted.name)
                tried = try_forms(table, pay_by(rewards)) if is_stated else None
                self._show_set(table, chosen, tried)
                found = overlapping(table, held_out)
                overlaps = frozenset(overlap.row for overlap in found)
                self._sets.append(_Loaded(wanted._replace(chosen=chosen), table, overlaps))
                self._say(overlap_lines(found, held_out) if held_out else _NO_SETS)
                check_tests(rewards, table)
            for table in held_out.values():
                check_tests(rewards, table)

    def write(self, path: Path) -> None:
        """Write the rows of the prompts that a run would train on, except prompts that overlap with
        an evaluation set; each source of a mixture to a file of its own. Raise DataError for rows
        that would change in the file, and OSError.
        """
        for each in self._sets:
            name, key, chosen = each.wanted
            target = path.with_name(f"{path.stem}.{name}{path.suffix}") if name else path
            kept = [place for place in range(len(each.table)) if place not in each.overlaps]
            if not kept:
                raise DataError(f"{key}: every prompt overlaps with an evaluation set")
            source_rows = each.table.source_rows
            rows = [source_rows[place] for place in kept]
            partial_file = target.with_name(f".partial_{target.name}")
            try:
                copy_rows(chosen, rows, partial_file, key=key, seed=self._config.seed)
                self._check_written(each, kept, partial_file)
                partial_file.replace(target)
            except UnwritableError as error:
                remedy = f"use write={target.with_suffix('.parquet')}"
                raise DataError(f"{target}: {error}; {remedy}") from error
            finally:
                partial_file.unlink(missing_ok=True)
            self._say(
                f"{len(kept):,} rows written to {target}, {len(each.overlaps):,} left out that "
                "overlap with an evaluation set; train on them with the same settings and "
                f"{key}={target}{' (without args)' if chosen.args else ''}"
            )

    def _check_written(self, each: _Loaded, kept: Sequence[int], path: Path) -> None:
        """Raise UnwritableError unless the file gives the same tokens and answers."""
        chosen = replace(each.wanted.chosen, path=str(path), args={})
        try:
            written, _ = self._loader.load(each.wanted._replace(name="", chosen=chosen), ())
        except DataError as error:
            raise UnwritableError(f"its rows could not be read back ({error})") from error
        found = [(prompt.token_ids, prompt.answer) for prompt in written]
        wanted = ((each.table[place].token_ids, each.table[place].answer) for place in kept)
        if found != list(wanted):
            raise UnwritableError("read back, its rows give other prompts or answers")

    def _show_set(
        self, table: PromptTable, chosen: PromptSetConfig, tried: FormsTried | None
    ) -> None:
        limit, too_long = self._config.data.max_prompt_tokens, len(table.all_lengths) - len(table)
        self._say(
            f"{chosen.path}\n{table.num_rows:,} rows, {table.num_duplicates:,} duplicates, "
            f"{too_long:,} longer than data.max_prompt_tokens={limit}: {len(table):,} prompts"
        )
        for text in (histogram(table.all_lengths), render(table), *table.notes, forms_lines(tried)):
            self._say(text)


def histogram(lengths: NDArray[np.int64]) -> str:
    """Return the lengths [prompts] in tokens as bars, with median, 95th percentile and maximum."""
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, _BARS + 1).astype(int))
    numbers, _ = np.histogram(lengths, edges)
    width = len(f"{edges[-1]:,}")
    lines = [
        f"{low:>{width},} to {high - 1:>{width},}  {number:>9,}  "
        f"{'#' * round(_BAR_WIDTH * number / numbers.max())}"
        for low, high, number in zip(edges[:-1], edges[1:], numbers, strict=True)
    ]
    middle, high = np.percentile(lengths, [50, 95])
    return "\n".join(
        [
            f"tokens of a prompt: median {middle:,.0f}, 95 % at most {high:,.0f}, "
            f"longest {lengths.max():,}",
            *lines,
        ]
    )


def render(prompts: Sequence[Prompt]) -> str:
    """Return the first, middle and last prompt as the model sees them, with their answers."""
    places = sorted({0, len(prompts) // 2, len(prompts) - 1})[:_NUM_RENDERED]
    return "\n".join(
        f"prompt {place + 1:,}, from {prompts[place].source}; answer: {prompts[place].answer}\n"
        f"{indent(shorten(prompts[place].text), '  | ')}"
        for place in places
    )


def overlapping(
    prompts: Sequence[Prompt], held_out: Mapping[str, Sequence[Prompt]]
) -> list[Overlap]:
    """Return the prompts that share a passage with an evaluation prompt.

    Instructions and template, which every prompt of a set has, are not a passage of a question.
    They are left out by comparing prompts without the words that all of them begin and end with.
    """
    sets = {name: _questions(of_set) for name, of_set in held_out.items()}
    return Passages(sets).overlaps(_questions(prompts))


def _questions(prompts: Sequence[Prompt]) -> list[str]:
    """Return the texts of a set without the beginning and end that all of them share."""
    texts = [prompt.text for prompt in prompts]
    if len(texts) < 2:
        return texts
    head, tail = map(len, shared_ends(texts))
    return [text[head : max(head, len(text) - tail)] for text in texts]


def shared_ends(texts: Sequence[str]) -> tuple[str, str]:
    """Return what all texts begin with and what all end with; they may overlap in a short one."""
    flipped = [text[::-1] for text in texts]
    head, tail = map(commonprefix, (texts, flipped))
    return head, tail[::-1]


def overlap_lines(found: Sequence[Overlap], held_out: Mapping[str, Sequence[Prompt]]) -> str:
    """Return how many training prompts share a passage with each evaluation set, and examples."""
    lines = []
    for name, prompts in held_out.items():
        of_set = [overlap for overlap in found if overlap.set_name == name]
        rows = {overlap.evaluation_row for overlap in of_set}
        lines.append(
            f"{name}: {len(of_set):,} prompts share 13 words with {len(rows):,} of its "
            f"{len(prompts):,}"
        )
        lines += [f"  {overlap.passage!r}" for overlap in of_set[:_NUM_SHOWN_OVERLAPS]]
    return "\n".join(lines)
