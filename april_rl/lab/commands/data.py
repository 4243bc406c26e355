"""`python -m april_rl data PATH...`: show what a data set contains before a GPU is paid for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from april_rl.errors import RunError

if TYPE_CHECKING:
    from april_rl.config import TrainConfig
    from april_rl.lab.rehearsal.data_page import DataPage


_USAGE = """usage: python -m april_rl data PATH... [+recipe=NAME] [data.KEY=VALUE ...] [write=FILE]

  python -m april_rl data openai/gsm8k:main data.prompt_column=question \\
      'data.answer_pattern="####\\s*(.+)"'
  python -m april_rl data train.jsonl other.parquet model.path=Qwen/Qwen3-4B
  python -m april_rl data train.jsonl '+evaluation.sets.test={path: test.jsonl}' write=clean.jsonl

PATH is what data.path takes: a .jsonl, .json or .parquet file, a data set id, reasoning_gym:NAME.
For each set it shows rows, duplicates, prompts that are too long, lengths in tokens, three prompts
as the model sees them, what the reward gives right and wrong answers in each form, and which
prompts share 13 consecutive words with an evaluation set. With the reward code, it tries the tests
of every row on programs that do nothing, and names rows that one of them passes. write=FILE (.jsonl
or .parquet) writes the rows of the prompts that a run would train on, with all columns and
unrendered, without prompts that share words: train with the same settings and data.path=FILE.
Each source of a mixture gets its own file. Settings are those of training; without model.path
lengths are in tokens of Qwen3."""
_WRITE, _WRITABLE = "write=", (".jsonl", ".parquet")
_DEFAULT_MODEL = "Qwen/Qwen3-4B"


def main(arguments: Sequence[str]) -> int:
    """Show each set that `arguments` name and return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    try:
        return _show(arguments)
    except OSError as error:
        raise RunError(str(error)) from error


def _show(arguments: Sequence[str]) -> int:
    from april_rl.start.planning.checks import check_settings

    paths = [a for a in arguments if "=" not in a and not a.startswith(("+", "~"))]
    if options := [path for path in paths if path.startswith("-")]:
        return _refuse(f"{options[0]} is not an option; settings are written KEY=VALUE")
    overrides = [a for a in arguments if a not in paths and not a.startswith(_WRITE)]
    targets = [a.removeprefix(_WRITE) for a in arguments if a.startswith(_WRITE)]
    configs = _configs(paths, overrides)
    if targets and len(configs) > 1:
        return _refuse(f"{_WRITE}{targets[-1]} takes one PATH, got {len(configs)}")
    if targets and Path(targets[-1]).suffix not in _WRITABLE:
        return _refuse(f"{_WRITE}{targets[-1]} must end in .jsonl or .parquet")
    if targets and not (folder := Path(targets[-1]).parent).is_dir():
        return _refuse(f"{_WRITE}{targets[-1]}: there is no folder {folder}")
    configs = [check_settings(config, loads_model=False) for config in configs]
    from april_rl.lab.rehearsal.data_page import DataPage
    from april_rl.start.planning.model import without_network_go_offline

    without_network_go_offline()
    for config in configs:
        page = DataPage(config, say=lambda text: print(text, flush=True))
        page.show()
        if targets:
            _write(page, Path(targets[-1]))
    return 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _write(page: DataPage, path: Path) -> None:
    try:
        page.write(path)
    except OSError as error:
        raise RunError(f"{_WRITE}{path} cannot be written: {error.strerror}") from error


def _configs(paths: Sequence[str], overrides: Sequence[str]) -> list[TrainConfig]:
    """Return a configuration for each path, or the recipe's own one if no path is given."""
    from april_rl.config.store import compose_overrides, to_config

    names = {override.lstrip("+").partition("=")[0] for override in overrides}
    model = [] if {"model.path", "recipe"} & names else [f"model.path={_DEFAULT_MODEL}"]
    chosen = [[f"data.path='{path}'"] for path in paths] or [[]]
    return [to_config(compose_overrides([*overrides, *model, *path])) for path in chosen]
