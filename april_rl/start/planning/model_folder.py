"""Checks the folder that model.path or a key like it names, before transformers is imported."""

from __future__ import annotations

import json
from pathlib import Path

from april_rl.errors import PreflightError
from april_rl.run.checkpointing.exports import INDEX, SINGLE_FILE, newest_export

_CONFIG = "config.json"


def check_model_folder(given: str, *, key: str = "model.path", may_be_on_hub: bool = True) -> None:
    """Raise PreflightError if the setting `key` is a path without a model: a folder that does not
    exist, has no config.json or no weights, or is the directory of a run. A name that may be a
    model of the hub passes unless `may_be_on_hub` is false.
    """
    from april_rl.run.checkpointing.resume import CHECKPOINTS  # it needs numpy

    path = Path(given)
    for folder, kind in ((path, "a run directory"), (path.parent.parent, "a checkpoint")):
        is_in_run = folder == path or path.parent.name == CHECKPOINTS
        if is_in_run and path.is_dir() and (export := newest_export(folder)) is not None:
            raise PreflightError(f"{key}={path} is {kind}: give an export, {export}")
    if path.is_file():
        raise PreflightError(
            f"{key}={path} is a file; give the folder that has {_CONFIG} and the weights"
        )
    if path.is_dir():
        _check_config(path, key=key)
        return
    is_marked = path.is_absolute() or given.startswith((".", "~"))
    has_parent = path.parent.is_dir() and (is_marked or path.parent != Path())
    is_hub_id = may_be_on_hub and not is_marked and len(path.parts) <= 2  # OWNER/NAME
    if is_hub_id or not (has_parent or is_marked):
        return
    beside = _names_in(path.parent) if path.parent.is_dir() else ""
    raise PreflightError(f"{key}={given} does not exist{beside}")


def _check_config(folder: Path, *, key: str) -> None:
    config = folder / _CONFIG
    if not config.is_file():
        raise PreflightError(
            f"{key}={folder} is not a model: it has no {_CONFIG}{_names_in(folder)}"
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreflightError(f"{key}={folder}: {_CONFIG} cannot be read: {error}") from error
    if not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX)):
        raise PreflightError(
            f"{key}={folder} has neither {SINGLE_FILE} nor {INDEX}: save the model with "
            "save_pretrained(), which writes them"
        )


def _names_in(folder: Path) -> str:
    names = sorted(one.name for one in folder.iterdir())[:5]
    return f"; {folder} has {', '.join(names)}" if names else ""
