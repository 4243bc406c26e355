"""Traces of a worker's calls: each call as a range, some with torch's operators and kernels.

A worker leaves files; the report makes one trace of them (`lab/report/step_trace.py`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NUM_TICKS = 4  # ticks that are traced with operators: a whole rollout would take gigabytes
_MAX_MEMORY_EVENTS = 200_000


@dataclass(slots=True)
class _Recording:
    folder: Path
    num_ticks: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)


class CallProfiler:
    """Records the calls between `start` and `write`; otherwise a call costs a comparison."""

    def __init__(self, *, device: str) -> None:
        self._device = device
        self._recording: _Recording | None = None

    def start(self, folder: Path) -> None:
        """Record calls from now on; only the first ticks with operators, to keep traces small."""
        self._recording = _Recording(folder)
        if self._device == "cuda":
            import torch

            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)

    @contextmanager
    def call(self, name: str, *, is_tick: bool = False) -> Iterator[None]:
        """Record the call in the context."""
        recording = self._recording
        if recording is None:
            yield
            return
        recording.num_ticks += is_tick
        call: dict[str, Any] = {"name": name, "began_ns": time.time_ns()}
        if is_tick and recording.num_ticks > _NUM_TICKS:
            yield
        else:
            call["trace"] = f"torch_{len(recording.calls):05d}.json.gz"
            with self._operators(recording.folder / call["trace"]):
                yield
        recording.calls.append({**call, "ended_ns": time.time_ns()})

    def write(self) -> None:
        """Write calls.json, and on CUDA memory.pickle for pytorch.org/memory_viz."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if self._device == "cuda":
            import torch

            torch.cuda.memory._dump_snapshot(  # type: ignore[no-untyped-call]
                str(recording.folder / "memory.pickle")
            )
            torch.cuda.memory._record_memory_history(enabled=None)
        found = {"pid": os.getpid(), "calls": recording.calls}
        (recording.folder / "calls.json").write_text(json.dumps(found))

    @contextmanager
    def _operators(self, path: Path) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            yield
        profiler.export_chrome_trace(str(path))
