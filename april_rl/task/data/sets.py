"""The prompt sets of a run: training sources and evaluation sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from april_rl.config.prompt_sets import training_sets
from april_rl.config.task import DataConfig, PromptSetConfig
from april_rl.task.data.prompts import PromptTable, load_prompts
from april_rl.task.data.tokenizer import Tokenizer


class PromptSets:
    """Loads the sets of a run and reports how many prompts each has."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        columns: Mapping[str, Collection[str]] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        has_agent: bool = False,
        tell: Callable[[str], None],
    ) -> None:
        """`seed` draws procedural rows; `columns` has the data columns to keep, by set; the model
        sees the environment's `tools`; `tell` gets one line for each set, and its notes.
        """
        self._chosen = training_sets(data)
        self._tools = list(tools)
        self._columns, self._tell = columns or {}, tell
        self._load = partial(
            load_prompts,
            tokenizer=tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            deduplicate=data.deduplicate,
            seed=seed,
            has_agent=has_agent,
        )

    def load(self, *, key: str, chosen: PromptSetConfig, dataset: str) -> PromptTable:
        """Return the prompts of the set that the setting `key` names; raises DataError."""
        columns = self._columns.get(dataset, ())
        if self._tools and chosen.environment:
            variables = {**chosen.chat_template_kwargs, "tools": self._tools}
            chosen = replace(chosen, chat_template_kwargs=variables)
        table = self._load(chosen, key=key, dataset=dataset, columns=columns)
        self._tell(table.summary)
        for note in table.notes:
            self._tell(note)
        return table

    def training(self) -> dict[str, PromptTable]:
        return {
            name: self.load(
                key=f"data.sources.{name}.path" if name else "data.path",
                chosen=chosen,
                dataset=name,
            )
            for name, chosen in self._chosen.items()
        }
