"""A worker's part of a checkpoint, written while the worker does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from april_rl.checkpointing.checkpointer import Written, reason_of
from april_rl.checkpointing.manifest import FileRecord, record


class BackgroundWrite:
    """Files that a thread writes into a folder, and their hashes."""

    def __init__(self, write: Callable[[Path], Sequence[Path]], folder: Path) -> None:
        """Begin. `write` returns the files it has written."""
        self._folder = folder
        self._records: dict[str, FileRecord] = {}
        self._error = ""
        # What `write` holds is free when the thread has ended: the next one takes as much again.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def outcome(self) -> Written | None:
        """Return what was written; None while it is being written."""
        if self._thread.is_alive():
            return None
        return Written(records=self._records, error=self._error)

    def _run(self, write: Callable[[Path], Sequence[Path]]) -> None:
        try:
            for path in write(self._folder):
                self._records[path.relative_to(self._folder).as_posix()] = record(path)
        except Exception as error:  # whatever it is, the checkpoint is not whole
            self._error = reason_of(error)
