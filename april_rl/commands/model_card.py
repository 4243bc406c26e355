"""The model card of an exported policy, from the records of the run that it lies in."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from april_rl.checkpointing.folder import latest
from april_rl.checkpointing.manifest import CheckpointError, Manifest, read_manifest
from april_rl.checkpointing.resume import CHECKPOINTS
from april_rl.config import TrainConfig
from april_rl.config.store import run_config
from april_rl.data.files import is_file
from april_rl.errors import RunError
from april_rl.evaluation.intervals import Estimate
from april_rl.evaluation.settings import set_sampling
from april_rl.tracking.metrics_file import read_metrics
from april_rl.tracking.tracker import METRICS_FILE

CONFIG = "config.yaml"
_EXPORTS, _STEP = "exports", "step_"


# Files that an export contains in addition to the weights: settings, tokenizer, adapter and the
# user's own card.
_NAMES = {
    SAFETENSORS_INDEX_FILE,
    "README.md",
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
}


class ExportError(RunError):
    """The folder is not an exported policy, or the records of its run cannot be read."""


def exported_files(folder: Path) -> list[str]:
    """Return the paths of an export's files within it, sorted.

    Only README.md and files with the names that an export writes are returned: no other file, no
    link and no hidden file. Raise ExportError if the folder is not an export, or lacks a file of
    its weights.
    """
    if not folder.is_dir():
        raise ExportError(f"there is no folder {folder}: give an export, RUN/{_EXPORTS}/{_STEP}N")
    if exports := sorted(folder.glob(f"{_EXPORTS}/{_STEP}*"), key=_step_of):
        raise ExportError(f"{folder} is a run directory: give an export, such as {exports[-1]}")
    index = folder / SAFETENSORS_INDEX_FILE
    weights = _weight_files(index) if index.is_file() else {SAFETENSORS_SINGLE_FILE}
    files = sorted(name for name in _files_in(folder) if name in weights | _NAMES)
    if missing := sorted(({"config.json"} | weights) - set(files)):
        raise ExportError(
            f"{folder} is not an exported policy: it has no {missing[0]}. A run writes exports to "
            f"RUN/{_EXPORTS}/{_STEP}N"
        )
    return files


def other_files(folder: Path) -> list[str]:
    """Return the paths, sorted, of files and links in an export that it did not write."""
    written = set(exported_files(folder))
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if name not in written)


def _files_in(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not (Path(parent) / name).is_symlink()]
        paths = (Path(parent) / name for name in names)
        yield from (
            path.relative_to(folder).as_posix()
            for path in paths
            if path.is_file() and not path.is_symlink()
        )


def _weight_files(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError) as error:
        raise ExportError(f"{index} is damaged ({error!r}): export the policy again") from error


def _step_of(export: Path) -> int:
    step = export.name.removeprefix(_STEP)
    return int(step) if step.isdecimal() else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a run that concern one of its exports."""

    step: int  # the step of the export
    config: TrainConfig
    settings: str  # the text of config.yaml
    manifest: Manifest | None  # the run's last manifest; None if it has none
    before: Mapping[str, float | None]  # metrics before the first step; empty if there are none
    after: Mapping[str, float | None]  # metrics of `step`; empty if there are none

    @classmethod
    def of(cls, export: Path) -> Self | None:
        """Return the records of the run that `export` lies in; None outside of a run.

        Raise RunError for records that cannot be read.
        """
        export = export.resolve()
        run, step = export.parent.parent, _step_of(export)
        if export.parent.name != _EXPORTS or step < 0 or not (run / CONFIG).is_file():
            return None
        metrics = run / METRICS_FILE
        try:
            rows = read_metrics(metrics) if metrics.is_file() else []
        except ValueError as error:
            raise ExportError(str(error)) from error
        by_step = {row["step"]: row for row in rows}
        return cls(
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
            "data": paths,
            "rewards": functions or [config.reward.function],
            "command": shlex.join(about.get("overrides", ())),
        }
    template = Path(__file__).with_suffix(".md")
    card: ModelCard = ModelCard.from_template(data, template_path=str(template), **shown)
    return card


def _hub_id(path: str) -> str | None:
    """Return the id on the hub that a setting names, OWNER/NAME; None for a local path, a builtin
    or a task.
    """
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
            metric_type="accuracy",
            metric_name=f"avg@{records.num_samples(name)}",
            metric_value=round(estimates["avg"].value, 4),
        )
