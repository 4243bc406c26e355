"""The trace of a profiled step: torch's own profiler, placed on the controller's clock."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch
from report_runs import make_run

from april_rl.lab.commands.report import main
from april_rl.lab.report.step_trace import write_step_traces
from april_rl.run.tracking.call_profiler import CallProfiler

SLACK_US = 1000  # time between two readings of the clock


def profile(run_dir: Path, *, num_ticks: int) -> Path:
    """Profile a step that runs an update and then ticks; return its folder."""
    folder = run_dir / "profile" / "step_00002"
    folder.mkdir(parents=True)
    profiler, began_ns = CallProfiler(device="cpu"), time.time_ns()
    with profiler.call("update"):  # this comes before the step and is not in the trace
        torch.ones(4) + 1
    profiler.start(folder)
    with profiler.call("update"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    update = {"name": "update", "began_ns": began_ns, "ended_ns": time.time_ns()}
    for _ in range(num_ticks):
        with profiler.call("advance", is_tick=True):
            torch.ones(4) + 1
    profiler.write()
    (folder / "phases.json").write_text(json.dumps([update]))
    return folder


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_operators_lie_within_their_call_and_phase_on_one_clock(tmp_path: Path) -> None:
    """Fails when torch's times are not shifted to the origin, or a call is left out."""
    profile(tmp_path, num_ticks=0)
    (path,) = write_step_traces(tmp_path)
    assert path == tmp_path / "profile" / "step_00002.trace.json.gz"
    assert list(path.parent.iterdir()) == [path]
    events = events_of(path)
    (phase,) = [event for event in events if event.get("cat") == "phase"]
    (call,) = [event for event in events if event.get("cat") == "call"]
    (product,) = [event for event in events if event["name"] == "aten::mm"]
    for outer, inner in ((phase, call), (call, product)):
        assert outer["ts"] - SLACK_US <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + SLACK_US
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[event["pid"]] for event in (phase, call, product)] == [
        "controller",
        "worker 0",
        "worker 0",
    ]


def test_only_the_first_ticks_have_operators(tmp_path: Path) -> None:
    """Fails when a whole rollout is traced, which takes gigabytes, or earlier calls remain."""
    profile(tmp_path, num_ticks=7)
    events = events_of(*write_step_traces(tmp_path))
    assert sum(event["name"] == "advance" for event in events) == 7
    assert sum(event["name"] == "aten::add" for event in events) == 4


def test_the_report_writes_the_trace_and_names_it_once(tmp_path: Path, capsys) -> None:
    """A step that is still in progress is left alone."""
    run_dir = make_run(tmp_path / "run")
    folder = profile(run_dir, num_ticks=1)
    (folder.parent / "step_00003").mkdir()
    assert main([str(run_dir)]) == 0
    assert "step_00002.trace.json.gz: open it at ui.perfetto.dev" in capsys.readouterr().out
    assert main([str(run_dir)]) == 0
    assert "perfetto" not in capsys.readouterr().out
    assert (folder.parent / "step_00003").is_dir()
