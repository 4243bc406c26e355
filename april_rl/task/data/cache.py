"""Cache of tokenized tables that take long to make, and the key of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import datasets
import xxhash

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.files import is_file
from april_rl.task.data.procedural import PREFIX
from april_rl.task.data.sources import load_id
from april_rl.task.data.tokenizer import Tokenizer

KEEP_FROM_BYTES = 8 * 2**20  # a smaller source is tokenized in seconds and not cached
_MADE_BY = (
    "columns.py",
    "json_rows.py",
    "messages.py",
    "rows.py",
    "rendering.py",
    "stop_tokens.py",
    "tokenized.py",
    "tokenizer.py",
)  # a change in one of these files makes every cached table invalid
_LIBRARIES = ("datasets", "transformers", "tokenizers")


def kept_folder(
    chosen: PromptSetConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    columns: Collection[str],
    deduplicate: bool,
) -> Path | None:
    """Return the folder in the Hugging Face cache for the table of these settings and this content,
    whether it exists yet or not; None for a small source, which is not cached.
    """
    identity = _identity(chosen, key=key)
    if identity is None:
        return None
    folder = Path(__file__).parent
    parts = {
        "source": identity,
        "settings": {k: v for k, v in asdict(chosen).items() if k != "path"},
        "columns": sorted(columns),
        "deduplicate": deduplicate,
        "tokenizer": tokenizer.fingerprint(),
        "code": [_file_digest(folder / name) for name in _MADE_BY],
        "libraries": [version(name) for name in _LIBRARIES],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    root = Path(datasets.config.HF_DATASETS_CACHE) / "april_rl"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{key}={chosen.path}: the cache folder {root} cannot be created: {error.strerror}; "
            "set HF_HOME to a writable folder"
        ) from error
    return root / xxhash.xxh3_128_hexdigest(text.encode())


def publish(made: Path, folder: Path) -> None:
    """Rename a finished table to its final name; if another run was faster, use its table."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _identity(chosen: PromptSetConfig, *, key: str) -> str | None:
    """Return a string that identifies a large source, or None for a small one."""
    path = chosen.path
    if is_file(path):
        file = Path(path)
        if not file.is_file() or file.stat().st_size < KEEP_FROM_BYTES:
            return None
        return f"{file.suffix} {_file_digest(file)}"
    if path.startswith(PREFIX):
        return None
    table = load_id(path, key=key, split=chosen.split)
    return table._fingerprint if table.data.nbytes >= KEEP_FROM_BYTES else None


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
