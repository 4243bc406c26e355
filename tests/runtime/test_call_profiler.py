"""Traces of a worker's calls: torch's own profiler, placed on the controller's clock."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch
from composed_config import refusal

from april_rl.runtime.call_profiler import CallProfiler

SLACK_US = 1000  # between two reads of the clock


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_operators_lie_within_their_call_on_the_callers_clock(tmp_path: Path) -> None:
    """Fails when torch's times are not moved to the origin, or a call is left out."""
    profiler, origin_ns = CallProfiler(device="cpu"), time.time_ns()
    profiler.start(origin_ns, num_ticks=0)
    with profiler.call("update"):
        began_us = (time.time_ns() - origin_ns) / 1e3
        torch.ones(64, 64) @ torch.ones(64, 64)
        ended_us = (time.time_ns() - origin_ns) / 1e3
    profiler.write(tmp_path / "worker.gz", rank=1)
    events = events_of(tmp_path / "worker.gz")
    (call,) = [event for event in events if event.get("cat") == "call"]
    (product,) = [event for event in events if event["name"] == "aten::mm"]
    assert call["name"] == "update"
    assert (
        began_us - SLACK_US
        <= product["ts"]
        <= product["ts"] + product["dur"]
        <= ended_us + SLACK_US
    )
    assert call["ts"] - SLACK_US <= product["ts"] <= call["ts"] + call["dur"]
    assert {event["pid"] for event in events} == {call["pid"]}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["worker 1"]


def test_only_the_first_ticks_have_operators_and_nothing_is_kept_outside(tmp_path: Path) -> None:
    """Fails when a whole rollout is traced, which takes gigabytes, or earlier calls stay."""
    profiler = CallProfiler(device="cpu")
    for number in range(2):
        with profiler.call("advance", is_tick=True):
            torch.ones(4) + 1
        profiler.start(time.time_ns(), num_ticks=2)
        for _ in range(5):
            with profiler.call("advance", is_tick=True):
                torch.ones(4) + 1
        path = tmp_path / f"{number}.gz"
        profiler.write(path, rank=0)
        events = events_of(path)
        assert sum(event["name"] == "advance" for event in events) == 5
        assert sum(event["name"] == "aten::add" for event in events) == 2


def test_steps_that_the_run_does_not_have_are_refused() -> None:
    said = refusal("+recipe=tiny_cpu", "trainer.num_steps=4", "profiler.steps=[0,3,5]")
    assert "profiler.steps=[0, 3, 5] names steps that the run does not have: [0, 5]" in said
