"""The model card of an exported policy, from the records of the run that it lies in."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from april_rl.config import TrainConfig
from april_rl.config.store import run_config
from april_rl.errors import RunError
from april_rl.run.checkpointing.exports import EXPORTS, step_of
from april_rl.run.checkpointing.folder import latest
from april_rl.run.checkpointing.manifest import CheckpointError, Manifest, read_manifest
from april_rl.run.checkpointing.resume import CHECKPOINTS
from april_rl.run.tracking.metrics_file import read_metrics
from april_rl.run.tracking.tracker import METRICS_FILE
from april_rl.task.data.files import is_file
from april_rl.task.evaluation.intervals import Estimate
from april_rl.task.evaluation.settings import set_sampling

CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a run that concern one of its exports."""

    run: Path
    step: int  # the step of the export
    config: TrainConfig
    settings: str  # the text of config.yaml
    manifest: Manifest | None  # the run's last manifest; None if it has none
    before: Mapping[str, float | None]  # metrics before the first step; empty if there are none
    after: Mapping[str, float | None]  # metrics of `step`; empty if there are none

    @classmethod
    def of(cls, export: Path) -> Self | None:
        """Return the records of the run that `export` lies in, or None; raise RunError."""
        export = export.resolve()
        run, step = export.parent.parent, step_of(export)
        if export.parent.name != EXPORTS or step < 0 or not (run / CONFIG).is_file():
            return None
        metrics = run / METRICS_FILE
        try:
            rows = read_metrics(metrics) if metrics.is_file() else []
        except ValueError as error:
            raise RunError(str(error)) from error
        by_step = {row["step"]: row for row in rows}
        return cls(
            run=run,
            step=step,
            config=run_config(run / CONFIG),
            settings=(run / CONFIG).read_text(encoding="utf-8"),
            manifest=_manifest(run),
            before=by_step.get(0, {}),
            after=by_step.get(step, {}),
        )

    def sets(self) -> Iterator[tuple[str, Mapping[str, Estimate]]]:
        """Yield every set that was evaluated at the export's step, with its estimates and, as
        `before`, avg@k before the first step.
        """
        for name in self.config.evaluation.sets:
            found = {
                "avg": _estimate(self.after, f"eval/{name}/avg_at_k"),
                "pass": _estimate(self.after, f"eval/{name}/pass_at_k"),
                "before": _estimate(self.before, f"eval/{name}/avg_at_k"),
            }
            if found["avg"] is not None:
                yield name, {key: value for key, value in found.items() if value is not None}

    def is_accuracy(self, name: str) -> bool:
        """Return whether all saved rewards of a set are 0 or 1: their mean is an accuracy."""
        path = self.run / "samples" / f"eval_{name}_step_{self.step}.jsonl"
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            return bool(rows) and all(row["reward"] in (0, 1, None) for row in rows)
        except (OSError, ValueError, KeyError):
            return False

    def num_samples(self, name: str) -> int:
        return set_sampling(self.config, self.config.evaluation.sets[name]).num_samples


def _manifest(run: Path) -> Manifest | None:
    last = latest(run / CHECKPOINTS)
    try:
        return None if last is None else read_manifest(last)
    except CheckpointError:  # the checkpoint has another format: the card does without it
        return None


def _estimate(row: Mapping[str, float | None], key: str) -> Estimate | None:
    value, low, high = (row.get(name) for name in (key, f"{key}_low", f"{key}_high"))
    if value is None or low is None or high is None:
        return None
    return Estimate(value, low, high)


def model_card(name: str, records: Records | None) -> ModelCard:
    """Return the card of the repository `name`, OWNER/NAME: model_card.md, filled."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["april_rl", "reinforcement-learning"],
        model_name=name.partition("/")[2],
    )
    shown: dict[str, Any] = {"title": data.model_name, "records": records}
    if records is not None:
        config = records.config
        paths = [each.path for each in config.data.sources.values()] or [config.data.path]
        data.base_model = _hub_id(config.model.path)
        data.datasets = sorted(filter(None, map(_hub_id, paths))) or None
        data.eval_results = list(_results(records)) or None
        functions = [each.function for each in config.reward.functions.values()]
        about = records.manifest.about if records.manifest is not None else {}
        shown |= {
            "sets": dict(records.sets()),
            "is_accuracy": all(records.is_accuracy(name) for name, _ in records.sets()),
            "data": paths,
            "rewards": functions or [config.reward.function],
            "command": shlex.join(about.get("overrides", ())),
        }
    template = Path(__file__).with_suffix(".md")
    card: ModelCard = ModelCard.from_template(data, template_path=str(template), **shown)
    return card


def _hub_id(path: str) -> str | None:
    """Return the hub id that a setting names, OWNER/NAME; None for a path, a builtin or a task."""
    name = path.partition(":")[0]
    if "/" not in name or is_file(name) or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _results(records: Records) -> Iterator[EvalResult]:
    for name, estimates in records.sets():
        path = records.config.evaluation.sets[name].path
        yield EvalResult(
            task_type="text-generation",
            dataset_type=_hub_id(path) or name,
            dataset_name=name,
            metric_type="accuracy" if records.is_accuracy(name) else "mean_reward",
            metric_name=f"avg@{records.num_samples(name)}",
            metric_value=round(estimates["avg"].value, 4),
        )
