"""One Chrome trace for each profiled step, from the files in profile/step_N/.

Times are microseconds since the step's first phase began, by each machine's own clock. Format:
"Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_CONTROLLER, _WORKER = 1, 100  # ids of processes in the trace; the worker's GPUs follow it


def write_step_traces(run_dir: Path) -> list[Path]:
    """Write profile/step_N.trace.json.gz for every profiled step that lacks it, and return the
    paths. Raise OSError or ValueError for files that cannot be read or written.
    """
    folders = sorted(path for path in (run_dir / "profile").glob("step_*") if path.is_dir())
    ended = [folder for folder in folders if (folder / "phases.json").is_file()]
    return [_write_trace(folder) for folder in ended]


def _write_trace(folder: Path) -> Path:
    path = folder.with_name(f"{folder.name}.trace.json.gz")
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, _events(folder))))
        file.write("\n]}\n")
    for part in [folder / "phases.json", folder / "calls.json", *folder.glob("torch_*.json.gz")]:
        part.unlink()
    if not any(folder.iterdir()):  # otherwise memory.pickle is still there
        folder.rmdir()
    return path


def _events(folder: Path) -> Iterator[Event]:
    phases = json.loads((folder / "phases.json").read_text())
    worker = json.loads((folder / "calls.json").read_text())
    origin_ns = min(phase["began_ns"] for phase in phases)
    yield from _name_events(_CONTROLLER, "controller", thread="phases")
    for phase in phases:
        yield _range(phase, "phase", origin_ns, process=_CONTROLLER)
    yield from _name_events(_WORKER, "worker 0", thread="calls")
    gpus = set[int]()
    for number, call in enumerate(worker["calls"]):
        yield _range(call, "call", origin_ns, process=_WORKER)
        if "trace" not in call:
            continue
        with gzip.open(folder / call["trace"], "rt", encoding="utf-8") as file:
            trace = json.load(file)
        for event in _place_events(trace, number, origin_ns, pid=worker["pid"]):
            gpu = event["pid"] - _WORKER - 1
            if gpu >= 0 and gpu not in gpus:
                gpus.add(gpu)
                yield from _name_events(event["pid"], f"worker 0, GPU {gpu}")
            yield event


def _range(found: Event, category: str, origin_ns: int, *, process: int) -> Event:
    return {
        "ph": "X",
        "name": found["name"],
        "cat": category,
        "ts": (found["began_ns"] - origin_ns) / 1e3,
        "dur": (found["ended_ns"] - found["began_ns"]) / 1e3,
        "pid": process,
        "tid": 0,
    }


def _name_events(process: int, name: str, *, thread: str | None = None) -> Iterator[Event]:
    """Yield the events that name a process and its first thread, and sort it by its id."""
    shown = {"process_name": {"name": name}, "process_sort_index": {"sort_index": process}}
    shown |= {} if thread is None else {"thread_name": {"name": thread}}
    for kind, args in shown.items():
        yield {"ph": "M", "name": kind, "pid": process, "tid": 0, "args": args}


def _place_events(trace: Event, number: int, origin_ns: int, *, pid: int) -> Iterator[Event]:
    """Yield torch's events of the worker's call `number` with times since the origin, under ids
    that no other trace has.

    torch's times are microseconds since `baseTimeNanoseconds` of the Unix clock. An event of a host
    thread has the process id `pid`; an event of a kernel has the GPU's number.
    """
    shift = (trace["baseTimeNanoseconds"] - origin_ns) / 1e3
    for event in trace["traceEvents"]:
        # Names, and torch's own window.
        is_mark = event["ph"] in ("M", "i") or event.get("cat") == "Trace"
        if is_mark or not isinstance(event["pid"], int):
            continue
        process = _WORKER if event["pid"] == pid else _WORKER + 1 + event["pid"]
        placed = {**event, "ts": event["ts"] + shift, "pid": process}
        if "id" in event:  # the arrow between a call and its kernel
            placed["id"] = f"{number}.{event['id']}"
        yield placed
