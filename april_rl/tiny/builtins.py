"""Replace the `builtin:` paths of a configuration by folders and files."""

from __future__ import annotations

from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.tiny.prepare import resolve


def resolve_builtins(config: TrainConfig) -> None:
    """Replace every `builtin:` path of `config` by its folder or file, building what is missing.

    A model folder becomes absolute, because workers run in other directories. Raises RunError
    naming the key.
    """
    model = Path(resolve(config.model.path, key="model.path"))
    if model.is_dir():  # otherwise a hub id
        config.model.path = str(model.absolute())
    config.data.path = resolve(config.data.path, key="data.path")
    for name, source in config.data.sources.items():
        source.path = resolve(source.path, key=f"data.sources.{name}.path")
    for name, held_out in config.evaluation.sets.items():
        held_out.path = resolve(held_out.path, key=f"evaluation.sets.{name}.path")
