"""Turn raw rows into a table of texts and tokens: checked, deduplicated, rendered and tokenized."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import xxhash
from datasets import Features, List, Value
from numpy.typing import NDArray

from april_rl.config.task import TASK_PREFIX, PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.files import is_file
from april_rl.task.data.rendering import EXTRA, BatchTokenizer, Renderer
from april_rl.task.data.rows import RowReader, check_rows
from april_rl.task.data.sources import (
    RawTable,
    RowNames,
    load_id,
    map_again,
    open_source,
    quiet,
    row_names,
)
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.task.data.unread import unread_notes

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
_ROWS_PER_PROCESS = 10_000  # with fewer rows, tokenizing ends before a second process has started
_INFO = "info.json"
_FINGERPRINT_ROWS = 4096  # rows of a table that are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedTable:
    """Every distinct row of a source with its text and tokens, in source order."""

    table: datasets.Dataset  # text, token_ids, answer, place (in the source), and extra columns
    lengths: NDArray[np.int64]  # tokens of each row
    num_rows: int  # rows of the source
    names: RowNames
    fingerprint: str  # hash of the tokens and answers of all rows, in order
    unknown_frac: float  # share of the tokens that stand for text outside the vocabulary
    unknown_row: int  # the first row with such a token; 0 when there is none
    notes: list[str]  # notes for the user on columns that are not read


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMaker:
    """Makes the tokenized table of one set, or loads it from the cache."""

    chosen: PromptSetConfig
    tokenizer: Tokenizer
    key: str  # the setting that names the set
    columns: Collection[str]
    deduplicate: bool
    seed: int

    def table(self) -> TokenizedTable:
        """Return the table, in memory or from the cache; raise DataError or TokenizerError."""
        folder = self._kept_folder()
        if folder is None:
            with TemporaryDirectory() as work:
                return self._make(Path(work), into=None)
        if folder.is_dir():
            return self._read(folder)
        with TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as work:
            made = Path(work) / folder.name
            made.mkdir()
            self._make(Path(work), into=made)
            try:
                made.rename(folder)
            except OSError:  # another run was faster, and its table is used
                if not folder.is_dir():
                    raise
        return self._read(folder)

    def _kept_folder(self) -> Path | None:
        """Return the folder in the Hugging Face cache for these settings and this content, whether
        it exists yet or not; None for a small source, which is not cached.
        """
        identity = self._identity()
        if identity is None:
            return None
        folder = Path(__file__).parent
        parts = {
            "source": identity,
            "settings": {k: v for k, v in asdict(self.chosen).items() if k != "path"},
            "columns": sorted(self.columns),
            "deduplicate": self.deduplicate,
            "tokenizer": self.tokenizer.fingerprint(),
            "code": [_file_digest(folder / name) for name in _MADE_BY],
            "libraries": [version(name) for name in _LIBRARIES],
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        root = Path(datasets.config.HF_DATASETS_CACHE) / "april_rl"
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{self.key}={self.chosen.path}: the cache folder {root} cannot be created: "
                f"{error.strerror}; set HF_HOME to a writable folder"
            ) from error
        return root / xxhash.xxh3_128_hexdigest(text.encode())

    def _identity(self) -> str | None:
        """Return a string that identifies a large source, or None for a small one."""
        path = self.chosen.path
        if is_file(path):
            file = Path(path)
            if not file.is_file() or file.stat().st_size < KEEP_FROM_BYTES:
                return None
            return f"{file.suffix} {_file_digest(file)}"
        if path.startswith(TASK_PREFIX):
            return None
        table = load_id(path, key=self.key, split=self.chosen.split)
        return table._fingerprint if table.data.nbytes >= KEEP_FROM_BYTES else None

    def _make(self, work: Path, *, into: Path | None) -> TokenizedTable:
        raw = open_source(self.chosen, key=self.key, seed=self.seed, folder=work)
        renderer = Renderer(self.chosen, self.tokenizer, raw.names)
        reader = RowReader(raw, self.chosen, self.columns)
        digests = check_rows(raw, reader)
        if self.deduplicate:
            places = np.sort(np.unique(digests, return_index=True)[1])  # first of equal rows
        else:
            places = np.arange(len(raw.table), dtype=np.int64)
        tokenize = BatchTokenizer(reader, renderer, tokenizer=self.tokenizer, places=places)
        with quiet():
            table = self._map(raw, reader, tokenize=tokenize, places=places, into=into)
        info: dict[str, Any] = {
            "num_rows": len(raw.table),
            "fingerprint": fingerprint(table),
            **_unknown(table, self.tokenizer.unknown_id),
            "notes": [*unread_notes(raw, reader.needed_columns)],
        }
        if into is not None:
            (into / _INFO).write_text(json.dumps(info), encoding="utf-8")
        return _with_lengths(table, info, names=raw.names)

    def _map(
        self,
        raw: RawTable,
        reader: RowReader,
        *,
        tokenize: BatchTokenizer,
        places: NDArray[np.int64],
        into: Path | None,
    ) -> datasets.Dataset:
        rows = raw.table.select_columns(reader.needed_columns)
        if len(places) < len(rows):
            rows = rows.select(places)
        num_processes = min(len(os.sched_getaffinity(0)), len(places) // _ROWS_PER_PROCESS)
        with _end_on_sigterm():
            return rows.map(
                tokenize,
                batched=True,
                with_indices=True,
                remove_columns=rows.column_names,
                features=Features(
                    {
                        "text": Value("string"),
                        "token_ids": List(Value("int32")),
                        "answer": Value("string"),
                        "place": Value("int64"),
                        **{f"{EXTRA}{name}": kind for name, kind in reader.columns.items()},
                    }
                ),
                num_proc=num_processes if into is not None and num_processes > 1 else None,
                keep_in_memory=into is None,
                cache_file_name=None if into is None else str(into / "prompts.arrow"),
                # By default `datasets` hashes the function: a tokenizer's hash is not stable.
                new_fingerprint="tokenized" if into is None else into.name,
            )

    def _read(self, folder: Path) -> TokenizedTable:
        info = json.loads((folder / _INFO).read_text(encoding="utf-8"))
        shards = sorted(folder.glob("prompts*.arrow"))  # each process wrote one
        table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(s)) for s in shards])
        return _with_lengths(table, info, names=row_names(self.chosen, info["num_rows"]))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def fingerprint(table: datasets.Dataset) -> str:
    """Return the hash of all tokens and answers, however the table is divided into chunks."""
    rows = map_again(table).data.select(["token_ids", "answer"])
    digest = xxhash.xxh3_128()
    for start in range(0, len(rows), _FINGERPRINT_ROWS):
        part = rows.slice(start, _FINGERPRINT_ROWS)
        tokens = part.column("token_ids")
        digest.update(pyarrow.compute.list_value_length(tokens).to_numpy().tobytes())
        digest.update(pyarrow.compute.list_flatten(tokens).to_numpy().tobytes())
        digest.update(json.dumps(part.column("answer").to_pylist()).encode())
    return digest.hexdigest()


def _unknown(table: datasets.Dataset, unknown_id: int | None) -> dict[str, float | int]:
    found = {"unknown_frac": 0.0, "unknown_row": 0}
    if unknown_id is None:
        return found
    rows = map_again(table).data.select(["token_ids"])
    num_unknown = num_tokens = 0
    for start in range(0, len(rows), _FINGERPRINT_ROWS):
        tokens = rows.slice(start, _FINGERPRINT_ROWS).column("token_ids").combine_chunks()
        is_unknown = pyarrow.compute.list_flatten(tokens).to_numpy() == unknown_id
        if not num_unknown and is_unknown.any():
            row = pyarrow.compute.list_parent_indices(tokens)[int(is_unknown.argmax())]
            found["unknown_row"] = start + row.as_py()
        num_unknown, num_tokens = num_unknown + int(is_unknown.sum()), num_tokens + len(is_unknown)
    return found | {"unknown_frac": num_unknown / max(1, num_tokens)}


def _with_lengths(
    table: datasets.Dataset, info: Mapping[str, Any], *, names: RowNames
) -> TokenizedTable:
    lengths = pyarrow.compute.list_value_length(table.data.column("token_ids")).to_numpy()
    return TokenizedTable(table=table, lengths=lengths.astype(np.int64), names=names, **info)


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the processes that start here: `datasets` sends it when one has failed,
    and waits for the others. Python loses a handled signal that arrives while a process is being
    forked, and then the wait would never end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
