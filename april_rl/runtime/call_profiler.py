"""A worker's calls as events of a Chrome trace: each call as a range, some with torch's operators.

Times are microseconds since an origin that the controller gives, by each machine's own clock.
Format of the events: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_MAX_MEMORY_EVENTS = 200_000
_PROCESSES_PER_RANK = 100  # ids of a rank's process and of its GPUs in the trace


@dataclass(slots=True)
class _Recording:
    origin_ns: int
    num_ticks: int  # ticks that are still recorded with their operators
    traces: list[Event] = field(default_factory=list)  # of torch, each for one call
    calls: list[Event] = field(default_factory=list)


class CallProfiler:
    """Records the calls between `start` and `write`; otherwise a call costs a comparison."""

    def __init__(self, *, device: str) -> None:
        """`device` is cpu or cuda."""
        self._device = device
        self._recording: _Recording | None = None

    def start(self, origin_ns: int, *, num_ticks: int) -> None:
        """Record calls from now on, the first `num_ticks` ticks with torch's operators and kernels,
        every other call with them; times are since `origin_ns` of the Unix clock.
        """
        self._recording = _Recording(origin_ns, num_ticks)
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
        is_detailed = not is_tick or recording.num_ticks > 0
        recording.num_ticks -= is_tick
        began_ns = time.time_ns()
        if is_detailed:
            with self._operators(recording):
                yield
        else:
            yield
        ended_ns = time.time_ns()
        recording.calls.append(
            {
                "ph": "X",
                "name": name,
                "cat": "call",
                "ts": (began_ns - recording.origin_ns) / 1e3,
                "dur": (ended_ns - began_ns) / 1e3,
            }
        )

    def write(self, path: Path, *, rank: int) -> None:
        """End the recording; write an event a line into the gzip file `path`, and on CUDA what its
        allocator did beside it, for pytorch.org/memory_viz. `rank` numbers the worker in the trace.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if self._device == "cuda":
            import torch

            torch.cuda.memory._dump_snapshot(  # type: ignore[no-untyped-call]
                str(path.with_suffix(".memory.pickle"))
            )
            torch.cuda.memory._record_memory_history(enabled=None)
        process = _PROCESSES_PER_RANK * (rank + 1)
        label = f"worker {rank}"
        events = [{**event, "pid": process, "tid": 0} for event in recording.calls]
        events += [*named_process(process, label), named_thread(process, 0, "calls")]
        for number, trace in enumerate(recording.traces):
            events += _placed(trace, number, recording.origin_ns, process=process, label=label)
        write_events(path, events)

    @contextmanager
    def _operators(self, recording: _Recording) -> Iterator[None]:
        """Keep torch's trace of what runs in the context."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            yield
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            recording.traces.append(json.loads(path.read_text()))


def named_process(process: int, name: str) -> list[Event]:
    """Return the events that name a process of the trace and sort it by its id."""
    return [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}},
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": process,
            "tid": 0,
            "args": {"sort_index": process},
        },
    ]


def named_thread(process: int, thread: int, name: str) -> Event:
    """Return the event that names a thread of the trace."""
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write one event a line, compressed."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def _placed(
    trace: Event, number: int, origin_ns: int, *, process: int, label: str
) -> Iterator[Event]:
    """Yield torch's events of the worker's trace `number` with times since the origin, under ids
    that no other trace has.

    torch's times are microseconds since `baseTimeNanoseconds` of the Unix clock. Its `pid` is that
    of this process for host threads, and the GPU's number for kernels.
    """
    shift = (trace["baseTimeNanoseconds"] - origin_ns) / 1e3
    named = {process}
    for event in trace["traceEvents"]:
        is_mark = event["ph"] in ("M", "i") or event.get("cat") == "Trace"  # names, torch's window
        if is_mark or not isinstance(event["pid"], int):
            continue
        on_host = event["pid"] == os.getpid()
        place = process if on_host else process + 1 + event["pid"]
        if place not in named:
            named.add(place)
            yield from named_process(place, f"{label}, GPU {event['pid']}")
        placed = {**event, "ts": event["ts"] + shift, "pid": place}
        if "id" in event:  # of an arrow between a call and its kernel
            placed["id"] = f"{process}.{number}.{event['id']}"
        yield placed
