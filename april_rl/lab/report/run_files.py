"""Files of a run directory, read once for a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from april_rl.errors import RunError
from april_rl.lab.report.length_bias import WINDOW_STEPS, LengthBias
from april_rl.run.tracking.metrics_file import read_metrics
from april_rl.training.rollout.measures.timeline import Timeline, read_timeline

Row = Mapping[str, float | None]


class ReportError(RunError):
    """The files of a run directory are missing or unreadable, so that no page can be made."""


@dataclass(frozen=True)
class RunFiles:
    """The files of one run; missing ones are empty."""

    run_dir: Path
    rows: Sequence[Row]  # every row of metrics.jsonl
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name in the configuration, or that of the folder."""
        return str(self.config.get("name") or self.run_dir.resolve().name)

    @cached_property
    def steps(self) -> list[Row]:
        return [row for row in self.rows if row.get("time/step_s") is not None]

    @cached_property
    def evaluation_sets(self) -> list[str]:
        """Return the names of the held-out sets, sorted."""
        keys = (key.split("/") for row in self.rows for key in row if key.startswith("eval/"))
        return sorted({parts[1] for parts in keys if parts[-1] == "avg_at_k"})

    def setting(self, key: str) -> object:
        """Return the setting at a dotted `key`; None if config.yaml has none."""
        value: object = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        """Return a setting that is a number, else `default`."""
        value = self.setting(key)
        return value if isinstance(value, (int, float)) else default

    @property
    def is_tail_missing(self) -> bool:
        """Return whether the longest responses may be parked still: the trained ones are then
        shorter than those that the policy writes.
        """
        last = max((step for step, _ in self.series("time/step_s")), default=0)
        is_early = last <= self.number("rollout.max_staleness")
        return is_early and self.total("rollout/parked_tokens") > 0

    @property
    def samples_per_step(self) -> int:
        """Return N·G, the samples a step trains."""
        return int(self.number("trainer.num_groups", 1) * self.number("rollout.group_size", 1))

    @property
    def num_engines(self) -> int:
        """Return how many engines sampled independently of each other."""
        size = self.number("engine.tensor_parallel_size", 1)
        return max(1, int(self.number("runtime.num_workers", 1) / size))

    @cached_property
    def trained_samples(self) -> list[int]:
        """Return how many samples each row trained [rows]: 0 for a row with only an evaluation
        and for a skipped step.
        """
        # The rows of a run that was resumed in another folder do not begin with its first step.
        before = 0.0 if self._has_beginning else None
        found = []
        for row in self.rows:
            groups = row.get("ledger/trained")
            num_groups = self.number("trainer.num_groups", 1)
            if groups is not None and before is not None:
                num_groups = groups - before
            is_trained = row.get("time/step_s") is not None and not row.get("loss/bad_step")
            found.append(round(num_groups * self.number("rollout.group_size", 1) * is_trained))
            before = before if groups is None else groups
        return found

    @property
    def scored_samples(self) -> float:
        """Return the samples of all groups that were scored, trained or not."""
        ends = ("ready", "trained", "rejected", "dropped")
        num_groups = sum(self._growth(f"ledger/{end}") for end in ends)
        return num_groups * self.number("rollout.group_size", 1)

    @property
    def _has_beginning(self) -> bool:
        return bool(self.rows) and (self.rows[0].get("step") or 0) <= 1

    def _growth(self, key: str) -> float:
        """Return by how much a metric that counts from the beginning of the run has grown."""
        values = self.values(key)
        return values[-1] - (0.0 if self._has_beginning else values[0]) if values else 0.0

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of every row that has the metric."""
        found = ((row["step"], row.get(key)) for row in self.rows)
        return [(int(step or 0), value) for step, value in found if value is not None]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.series(key)]

    def total(self, key: str) -> float:
        return sum(self.values(key))

    def mean(self, key: str, *, late: bool = False) -> float | None:
        """Return the mean of a metric over its rows, or over the later half of them."""
        values = self.values(key)
        values = values[len(values) // 2 :] if late else values
        return sum(values) / len(values) if values else None

    @cached_property
    def samples(self) -> tuple[int, list[Mapping[str, Any]]]:
        """Return the last step with saved samples, and the samples; step 0 and none if there is
        no such step.
        """
        return self._read_samples(self._sample_paths[-1:])

    @cached_property
    def first_samples(self) -> tuple[int, list[Mapping[str, Any]]]:
        """Return the first step with saved samples, and the samples; step 0 and none if it is
        the step that `samples` returns.
        """
        return self._read_samples(self._sample_paths[:-1][:1])

    def all_samples(self) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
        return (self._read_samples([path]) for path in self._sample_paths)

    @cached_property
    def _sample_paths(self) -> list[Path]:
        return sorted((self.run_dir / "samples").glob("step_*.jsonl"))

    def _read_samples(self, paths: Sequence[Path]) -> tuple[int, list[Mapping[str, Any]]]:
        for path in paths:
            try:
                with path.open(encoding="utf-8") as lines:
                    return _step_of(path), [json.loads(line) for line in lines]
            except ValueError as error:
                raise ReportError(f"{path} is not a file of samples ({error})") from error
        return 0, []

    @property
    def timeline(self) -> tuple[int, Timeline | None]:
        """Return the last step with a timeline, and the timeline; step 0 and None if there is
        none.
        """
        return list(self._timelines.items())[-1] if self._timelines else (0, None)

    @cached_property
    def length_bias(self) -> LengthBias | None:
        return LengthBias.of(list(self._timelines.values()))

    @cached_property
    def _timelines(self) -> dict[int, Timeline]:
        """Return the last timelines, by step."""
        paths = sorted((self.run_dir / "timeline").glob("step_*[0-9].json"))[-WINDOW_STEPS:]
        try:
            return {_step_of(path): read_timeline(path) for path in paths}
        except ValueError as error:
            raise ReportError(str(error)) from error


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def read_run(run_dir: Path) -> RunFiles:
    """Return the files in `run_dir`. Raises ReportError when it is not a run directory."""
    metrics, config = run_dir / "metrics.jsonl", run_dir / "config.yaml"
    for path in (metrics, config):
        if not path.is_file():
            raise ReportError(f"{run_dir} is not the directory of a run: it has no {path.name}")
    try:
        rows, plain = read_metrics(metrics), yaml.safe_load(config.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ReportError(f"{run_dir} cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise ReportError(f"{config} holds no settings")
    return RunFiles(run_dir, rows, plain)
