"""`environment/*`: what environments did, from what was counted."""

from __future__ import annotations

from collections.abc import Mapping

from april_rl.metrics import Mean, Metrics, Sum


def environment_metrics(counts: Mapping[str, int], *, answered_s: float) -> Metrics:
    """Return the metrics; `answered_s` is the time of all calls that were answered."""
    num = counts["answered"]
    return Metrics(
        {
            **({"environment/step_s": Mean(answered_s, num)} if num else {}),
            "environment/calls": Sum(counts["call"]),
            "environment/repeated_calls": Sum(counts["repeated call"]),
            "environment/errors": Sum(counts["failed"]),
            "environment/timeouts": Sum(counts["timeout"]),
            "environment/deaths": Sum(counts["death"]),
            "environment/retries": Sum(counts["retry"]),
            "environment/replays": Sum(counts["replay"]),
            "environment/out_of_room": Sum(counts["out of room"]),
        }
    )
