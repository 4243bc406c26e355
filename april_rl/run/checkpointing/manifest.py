"""The manifest of a checkpoint: sizes and hashes of its files, written last and checked first."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from april_rl.errors import RunError

FILE = "manifest.json"
FORMAT = 2  # version of the whole folder; a folder of another version is refused


class CheckpointError(RunError):
    """A checkpoint cannot be used; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Expected size and hash of a file."""

    bytes: int
    xxh3: str  # 128 bits, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The table of contents of a checkpoint."""

    step: int
    created: str  # local time, ISO 8601
    version: str  # version of april_rl
    about: Mapping[str, Any]  # what `checkpoint show` prints: ledger, tokens, workers, model
    files: Mapping[str, FileRecord]  # by path within the folder
    format: int = FORMAT


def record(path: Path) -> FileRecord:
    """Return the size and hash of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write the manifest and make it durable."""
    with (folder / FILE).open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest; raise CheckpointError if it is missing, broken or of another format."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {FILE}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else found
        raise CheckpointError(
            f"{path} has format {given!r}, and this version of april_rl reads format {FORMAT}: "
            "resume with the version of april_rl that wrote it"
        )
    try:
        files = {_inside(name): FileRecord(**of) for name, of in found.pop("files").items()}
        return Manifest(files=files, **found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def verify(
    folder: Path, *, hashes: bool = True, on_file: Callable[[str], None] = lambda _: None
) -> Manifest:
    """Check the size of every file, and with `hashes` its content, after a call of `on_file`;
    return the manifest. Raise CheckpointError for the first file that differs.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        on_file(name)
        path = folder / name
        try:
            num_bytes = path.stat().st_size
            is_same = not hashes or (num_bytes == expected.bytes and record(path) == expected)
        except OSError as error:
            raise CheckpointError(f"{path} is missing or cannot be read: {error}") from error
        if num_bytes != expected.bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes but {FILE} says {expected.bytes}: it is incomplete"
            )
        if not is_same:
            raise CheckpointError(
                f"{path} is damaged: its content does not match the hash in {FILE}"
            )
    return manifest


def _inside(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} is not a path within the checkpoint")
    return name
