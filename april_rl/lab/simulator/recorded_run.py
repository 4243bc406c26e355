"""The scenario that a run directory describes: its settings, lengths, rewards and engine cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.errors import RunError
from april_rl.lab.simulator.engine_cost import MIN_TICKS, EngineCost, fit_cost
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.scenarios import scenario_of
from april_rl.lab.simulator.simulation import Scenario
from april_rl.run.tracking.metrics_file import read_metrics
from april_rl.training.rollout.measures.timeline import read_timeline
from april_rl.training.rollout.ticks import TickWork

Row = dict[str, float | None]
# For runs with refill at α > 1: their batches have nearly equal sizes, which does not show what a
# small batch costs (docs/usage.md).
NO_SMALL_BATCHES = (
    "What small batches cost is a guess there, because this run had none; python -m april_rl "
    "compare measures the gain over a synchronous run."
)


class RecordedRunError(RunError):
    """A run directory lacks what a simulation needs; the message says what and why."""


def recorded_scenario(
    run_dir: Path, config: TrainConfig, *, num_files: int | None = None
) -> Scenario:
    """Return the run in `run_dir`, which had this configuration, as a scenario: its lengths,
    rewards and engine cost.

    Lengths and cost are from its last `num_files` files of samples and timelines, or from all;
    times are from its second half, where caches are warm. Raise RecordedRunError if it is not a
    run directory, or no samples or timelines were saved.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise RecordedRunError(f"{run_dir} is not the directory of a run: it has no metrics.jsonl")
    try:
        rows = read_metrics(path)
    except ValueError as error:
        raise RecordedRunError(str(error)) from error
    steps = [row for row in rows if row.get("rollout/time_s") is not None]
    late = steps[len(steps) // 2 :]
    scenario = scenario_of(
        config,
        num_engines=int(config.runtime.num_workers) // config.engine.tensor_parallel_size,
        length_of=Recorded(groups=_lengths(run_dir, num_files=num_files), seed=config.seed),
        cost=read_cost(run_dir, num_files=num_files),
        # A sleeping engine keeps nothing, even with resume=keep.
        keeps_parked=_mean(rows, "rollout/kept_samples") > 0,
        prompt_tokens=_mean(late, "rollout/prompt_tokens_mean"),
        no_signal_frac=_mean(rows, "reward/no_signal_frac"),
    )
    rest_s = _mean(late, "time/step_s") - _mean(late, "rollout/time_s")
    return replace(scenario, rest_s=max(0.0, rest_s))


def read_cost(run_dir: Path, *, num_files: int | None = None) -> EngineCost:
    """Return the engine's cost, fitted to the ticks in the later half of a run's timelines, or in
    the last `num_files` of that half; earlier files are read too if there are too few ticks.

    Raise RecordedRunError if there are no timelines, or all of them together have too few ticks.
    """
    folder = run_dir / "timeline"
    paths = sorted(folder.glob("step_*[0-9].json"), reverse=True)
    if not paths:
        raise RecordedRunError(
            f"{folder} holds no timeline of a step: run with tracking.save_samples_every=1"
        )
    half = (len(paths) + 1) // 2
    ticks: list[TickWork] = []
    try:
        for number, path in enumerate(paths):
            if number >= min(half, num_files or half) and len(ticks) >= MIN_TICKS:
                break
            ticks += read_timeline(path).ticks
        return fit_cost(ticks)
    except ValueError as error:
        raise RecordedRunError(
            f"{folder} does not show what an engine step costs: {error}. Train more steps with "
            "tracking.save_samples_every=1, or simulate a preset instead"
        ) from error


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
    # splitlines would also split a response at U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8").strip().split("\n"), start=1):
        try:
            record = json.loads(line)
            yield int(record["prompt_id"]), int(record["num_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise RecordedRunError(f"{path}:{number} is not a recorded sample ({error})") from error


def _mean(rows: Sequence[Row], key: str) -> float:
    """Return the mean over the rows that have the key; 0 if there are none."""
    values = [value for row in rows if (value := row.get(key)) is not None]
    return sum(values) / len(values) if values else 0.0
