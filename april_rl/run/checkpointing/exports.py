"""The policies that a run exports: where they are, and which files each consists of."""

from __future__ import annotations

import json
from pathlib import Path

from april_rl.errors import RunError

EXPORTS = "exports"  # folder name within a run directory
SINGLE_FILE = "model.safetensors"  # the weights, if they are in one file
INDEX = "model.safetensors.index.json"  # names the files of the weights, if there are several
TEMPLATES = "additional_chat_templates/*.jinja"  # a tokenizer's chat templates with names
_STEP = "step_"
# Files that an export contains in addition to the weights: settings, tokenizer, adapter and the
# user's own card.
_NAMES = {
    INDEX,
    "README.md",
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
}


def export_path(run_dir: Path, step: int) -> Path:
    return run_dir / EXPORTS / f"{_STEP}{step}"


def step_of(export: Path) -> int:
    """Return the step of an export from its folder's name; -1 for another name."""
    step = export.name.removeprefix(_STEP)
    return int(step) if step.isdecimal() else -1


def newest_export(run_dir: Path) -> Path | None:
    """Return the export of the latest step; None if the run has none."""
    return max(run_dir.glob(f"{EXPORTS}/{_STEP}*"), key=step_of, default=None)


def exported_files(folder: Path) -> list[str]:
    """Return the paths in an export, sorted, of README.md and the files that an export writes: no
    other file, no link and no hidden file. Raise RunError if the folder is not an export, or lacks
    a file of its weights.
    """
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}: give an export, RUN/{EXPORTS}/{_STEP}N")
    if (newest := newest_export(folder)) is not None:
        raise RunError(f"{folder} is a run directory: give an export, such as {newest}")
    index = folder / INDEX
    weights = _weight_files(index) if index.is_file() else {SINGLE_FILE}
    own = (
        path.relative_to(folder)
        for path in folder.rglob("*")  # which does not enter folders that are links
        if path.is_file() and not path.is_symlink()
    )
    files = sorted(
        path.as_posix()
        for path in own
        if path.as_posix() in weights | _NAMES or path.match(TEMPLATES)
    )
    if missing := sorted(({"config.json"} | weights) - set(files)):
        raise RunError(
            f"{folder} is not an exported policy: it has no {missing[0]}. A run writes exports to "
            f"RUN/{EXPORTS}/{_STEP}N"
        )
    return files


def other_files(folder: Path) -> list[str]:
    """Return the paths, sorted, of files and links in an export that it did not write."""
    written = set(exported_files(folder))
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if name not in written)


def _weight_files(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError) as error:
        raise RunError(f"{index} is damaged ({error!r}): export the policy again") from error
