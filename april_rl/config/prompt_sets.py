"""The prompt sets of a run, with defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from april_rl.config.task import (
    DataConfig,
    EvaluationSetConfig,
    PromptSetConfig,
    PromptSetOverrides,
)

_TEST_SPLIT = "test"  # default split of an evaluation set, so that it never has training rows


def training_sets(data: DataConfig) -> dict[str, PromptSetConfig]:
    """Return the sources of a mixture by name; a single set has the name ""."""
    if not data.sources:
        return {"": _fill_in(data, PromptSetOverrides(path=data.path))}
    return {name: _fill_in(data, source) for name, source in data.sources.items()}


def evaluation_set(data: DataConfig, chosen: EvaluationSetConfig) -> PromptSetConfig:
    """Return an entry of `evaluation.sets` with missing settings taken from `data`."""
    filled = _fill_in(data, chosen)
    filled.split = chosen.split or _TEST_SPLIT
    return filled


def has_chat(data: DataConfig, held_out: Mapping[str, EvaluationSetConfig]) -> bool:
    """Return whether any set of a run is rendered with the chat template."""
    chosen = [*training_sets(data).values(), *(evaluation_set(data, s) for s in held_out.values())]
    return any(each.is_chat for each in chosen)


def _fill_in(data: DataConfig, chosen: PromptSetOverrides) -> PromptSetConfig:
    given = {entry.name: getattr(chosen, entry.name) for entry in fields(PromptSetOverrides)}
    general = {entry.name: getattr(data, entry.name) for entry in fields(PromptSetConfig)}
    if chosen.path != data.path:
        general["args"] = {}  # the arguments belong to another task
    return PromptSetConfig(**general | {k: v for k, v in given.items() if v is not None})
