"""Read from a run directory what the simulator needs: lengths, rewards and engine cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from april_rl.errors import RunError
from april_rl.rollout.engine_cost import EngineCost
from april_rl.tracking.metrics_file import read_metrics

Row = dict[str, float | None]

_COST_KEYS = {field.name: f"engine/{field.name}" for field in fields(EngineCost)}


class RecordedRunError(RunError):
    """A run directory lacks what a simulation needs; the message says what and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Lengths and times of a run. Times are from its second half, where caches are warm."""

    lengths: tuple[tuple[int, ...], ...]  # response tokens of each recorded group
    cost: EngineCost  # mean over the steps of the second half
    no_signal_frac: float  # share of complete groups with equal rewards, rejected ones included
    prompt_tokens: int  # mean
    keeps_parked: bool  # whether parked samples kept their KV cache
    rest_s: float  # mean seconds of a step outside the rollout


def read_recorded_run(run_dir: Path, *, num_files: int | None = None) -> RecordedRun:
    """Read a run directory, with lengths from its last `num_files` files of samples, or from all.

    Raise RecordedRunError if it is not a run directory, no samples were saved, or no step has the
    engine's cost.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise RecordedRunError(f"{run_dir} is not the directory of a run: it has no metrics.jsonl")
    try:
        rows = read_metrics(path)
    except ValueError as error:
        raise RecordedRunError(str(error)) from error
    costed = [row for row in rows if all(row.get(key) is not None for key in _COST_KEYS.values())]
    if not costed:
        raise RecordedRunError(
            f"{path} has no step with {', '.join(_COST_KEYS.values())}: the run is older than "
            "these metrics, or its steps were too short to fit them; simulate a preset instead"
        )
    late = costed[len(costed) // 2 :]
    return RecordedRun(
        lengths=_lengths(run_dir, num_files=num_files),
        cost=EngineCost(**{name: _mean(late, key) for name, key in _COST_KEYS.items()}),
        no_signal_frac=_mean(rows, "reward/no_signal_frac"),
        prompt_tokens=max(1, round(_mean(late, "rollout/prompt_tokens_mean"))),
        keeps_parked=_mean(rows, "rollout/kept_samples") > 0,
        rest_s=max(0.0, _mean(late, "time/step_s") - _mean(late, "rollout/time_s")),
    )


def _lengths(run_dir: Path, *, num_files: int | None) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[str, int], list[int]] = {}
    paths = sorted((run_dir / "samples").glob("step_*.jsonl"))
    for path in paths[-(num_files or len(paths)) :]:
        for prompt_id, num_tokens in _samples(path):
            groups.setdefault((path.name, prompt_id), []).append(num_tokens)
    if not groups:
        raise RecordedRunError(
            f"{run_dir}/samples holds no samples of a step: run with tracking.save_samples_every=1"
        )
    return tuple(tuple(group) for group in groups.values())


def _samples(path: Path) -> Iterator[tuple[int, int]]:
    """Yield (prompt id, response tokens) of every line."""
    # Not splitlines, which would split a response at U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8").strip().split("\n"), start=1):
        try:
            record = json.loads(line)
            yield int(record["prompt_id"]), int(record["num_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise RecordedRunError(f"{path}:{number} is not a recorded sample ({error})") from error


def _mean(rows: Sequence[Row], key: str) -> float:
    """Return the mean over the rows that have the key; 0 when none has it."""
    values = [value for row in rows if (value := row.get(key)) is not None]
    return sum(values) / len(values) if values else 0.0
