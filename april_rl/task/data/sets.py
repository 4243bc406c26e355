"""The prompt sets of a run: training sources and evaluation sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from april_rl.config.prompt_sets import training_sets
from april_rl.config.task import DataConfig, PromptSetConfig
from april_rl.task.data.prompts import PromptTable, load_prompts
from april_rl.task.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSets:
    """Loads the sets of a run and reports how many prompts each has."""

    data: DataConfig
    tokenizer: Tokenizer
    seed: int  # draws procedural rows
    columns: Mapping[str, Collection[str]] = field(default_factory=dict)  # to keep, by set
    tools: Sequence[Mapping[str, Any]] = ()  # of the environment; the model sees them
    has_agent: bool = False
    tell: Callable[[str], None]  # gets one line for each set, and its notes

    def load(self, *, key: str, chosen: PromptSetConfig, dataset: str) -> PromptTable:
        """Return the prompts of the set that the setting `key` names; raises DataError."""
        if self.tools and chosen.environment:
            variables = {**chosen.chat_template_kwargs, "tools": list(self.tools)}
            chosen = replace(chosen, chat_template_kwargs=variables)
        table = load_prompts(
            chosen,
            self.tokenizer,
            key=key,
            max_prompt_tokens=self.data.max_prompt_tokens,
            dataset=dataset,
            columns=self.columns.get(dataset, ()),
            deduplicate=self.data.deduplicate,
            seed=self.seed,
            has_agent=self.has_agent,
        )
        self.tell(table.summary)
        for note in table.notes:
            self.tell(note)
        return table

    def training(self) -> dict[str, PromptTable]:
        return {
            name: self.load(
                key=f"data.sources.{name}.path" if name else "data.path",
                chosen=chosen,
                dataset=name,
            )
            for name, chosen in training_sets(self.data).items()
        }
