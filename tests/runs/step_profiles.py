"""Check the trace of a step."""

import gzip
import json
from pathlib import Path

SLACK_US = 1000.0  # time between two readings of the clock
PHASE_OF = {"advance": "rollout", "update": "update", "sync_weights": "weight sync"}


def check_profile(path: Path, *, workers: set[str]) -> None:
    """Check that every worker's calls, with their operators, lie in the matching phase of the
    controller.
    """
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(named.values()) == {"controller", *workers}
    phases = {e["name"]: e for e in events if e.get("cat") == "phase"}
    for name, phase in PHASE_OF.items():
        began = phases[phase]["ts"] - SLACK_US
        ended = phases[phase]["ts"] + phases[phase]["dur"] + SLACK_US
        calls = [e for e in events if e.get("cat") == "call" and e["name"] == name]
        assert {named[call["pid"]] for call in calls} == workers
        assert all(began <= call["ts"] <= call["ts"] + call["dur"] <= ended for call in calls)
    operators = [e for e in events if e["name"].startswith("aten::")]
    assert {named[operator["pid"]] for operator in operators} == workers
