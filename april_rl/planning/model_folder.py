"""Checks the folder that model.path names, before transformers is imported."""

from __future__ import annotations

import json
from pathlib import Path

from april_rl.planning.errors import PreflightError

_CONFIG = "config.json"


def check_model_folder(given: str) -> None:
    """Raise PreflightError where model.path is a path without a model: a folder that is not there
    or has no config.json, or the directory of a run. What may be a model of the hub passes.
    """
    path = Path(given)
    if exports := sorted(path.glob("exports/step_*"), key=lambda export: export.stat().st_mtime):
        raise PreflightError(f"model.path={path} is a run directory: give an export, {exports[-1]}")
    if path.is_file():
        raise PreflightError(
            f"model.path={path} is a file; give the folder that has {_CONFIG} and the weights"
        )
    if path.is_dir():
        _check_config(path)
        return
    is_marked = path.is_absolute() or given.startswith((".", "~"))
    has_parent = path.parent.is_dir() and (is_marked or path.parent != Path())
    if not (has_parent or is_marked):
        return
    raise PreflightError(f"model.path={given} does not exist{_beside(path.parent)}")


def _check_config(folder: Path) -> None:
    config = folder / _CONFIG
    if not config.is_file():
        raise PreflightError(
            f"model.path={folder} is not a model: it has no {_CONFIG}{_names_in(folder)}"
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreflightError(f"model.path={folder}: {_CONFIG} cannot be read: {error}") from error


def _beside(folder: Path) -> str:
    return _names_in(folder) if folder.is_dir() else ""


def _names_in(folder: Path) -> str:
    names = sorted(one.name for one in folder.iterdir())[:5]
    return f"; {folder} has {', '.join(names)}" if names else ""
