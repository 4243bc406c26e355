"""The notes of samples in the run directory, which are removed when no one can need them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from shutil import rmtree

from april_rl.environments.calls import EVALUATIONS, path_of
from april_rl.types import SampleId


class Notes:
    """A folder with the notes of samples."""

    def __init__(self, folder: Path, *, num_saves: int) -> None:
        """A sample's notes stay until the run was saved `num_saves` times after its end."""
        self._folder = folder
        # Samples that ended since each of the last saves, the latest first.
        self._ended: deque[set[SampleId]] = deque([set()], maxlen=num_saves + 1)

    def keep(self, sample_id: SampleId) -> None:
        """Note that a sample continues."""
        self._ended[0].discard(sample_id)

    def end(self, sample_id: SampleId) -> None:
        """Note that a sample has ended."""
        self._ended[0].add(sample_id)

    def saved(self) -> None:
        """Note that the run is saved; remove the notes that no checkpoint needs."""
        if len(self._ended) == self._ended.maxlen:
            for sample_id in self._ended[-1]:
                path_of(self._folder, sample_id, "").unlink(missing_ok=True)
        self._ended.appendleft(set())

    def evaluated(self) -> None:
        """Remove the notes of evaluations: the last one has ended."""
        rmtree(self._folder / EVALUATIONS, ignore_errors=True)
