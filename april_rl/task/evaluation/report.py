"""Read and write evaluation.json, and compare two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from april_rl.metrics import Metrics
from april_rl.task.evaluation.held_out import EvaluationError
from april_rl.task.evaluation.intervals import Estimate, paired_difference
from april_rl.task.evaluation.settings import SetSampling

FILE_NAME = "evaluation.json"
_COMPARISON_NAME = "comparison.json"
_FORMAT = 1
# These values depend on k, so they are compared only if both evaluations have the same k.
_OF_K = ("pass_at_k", "maj_at_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptValues:
    """The values of one prompt of a set."""

    source: str
    answer: str
    values: Mapping[str, float]  # avg_at_k, pass_at_k and, if voted, maj_at_k


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReport:
    """The figures of an evaluated set."""

    path: str  # the file or id of its prompts
    sampling: SetSampling
    num_prompts: int
    estimates: Mapping[str, Estimate]
    response_tokens_mean: float
    truncated_frac: float
    errors: int  # samples without a reward
    left_out_prompts: int  # prompts without a reward for each sample
    prompts: tuple[PromptValues, ...]  # prompts with a reward for each sample

    def metrics(self, name: str) -> Metrics:
        """Return `eval/<name>/*`, each estimate with the ends of its interval."""
        found: dict[str, float] = {}
        for key, (value, low, high) in self.estimates.items():
            found |= {key: value, f"{key}_low": low, f"{key}_high": high}
        found |= {
            "response_tokens_mean": self.response_tokens_mean,
            "truncated_frac": self.truncated_frac,
            "errors": float(self.errors),
            "left_out_prompts": float(self.left_out_prompts),
        }
        return Metrics({f"eval/{name}/{key}": value for key, value in found.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole evaluation: the settings it was made with, and its sets by name."""

    settings: Mapping[str, Any]
    sets: Mapping[str, SetReport]


class Difference(NamedTuple):
    """The difference between two evaluations of a set, over their common prompts."""

    num_prompts: int
    changes: Mapping[str, Estimate]  # avg_at_k and, if k is the same, the others
    notes: tuple[str, ...]  # which sampling settings differ


def write_report(report: Report, folder: Path) -> Path:
    """Write `folder`/evaluation.json and return its path. Raises OSError."""
    plain = {"format": _FORMAT, **asdict(report)}
    for of_set in plain["sets"].values():
        named = of_set["estimates"].items()
        of_set["estimates"] = {key: Estimate(*found)._asdict() for key, found in named}
    return _write(folder / FILE_NAME, plain)


def write_differences(differences: Mapping[str, Difference], folder: Path) -> Path:
    """Write the differences of all sets to `folder`/comparison.json and return its path. Raises
    OSError.
    """
    plain = {
        name: {
            **found._asdict(),
            "changes": {key: change._asdict() for key, change in found.changes.items()},
        }
        for name, found in differences.items()
    }
    return _write(folder / _COMPARISON_NAME, plain)


def _write(path: Path, plain: object) -> Path:
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def read_report(path: Path) -> Report:
    """Read the report in a file, or in the evaluation.json of a folder.

    Raises EvaluationError when it cannot be read or has another format.
    """
    if path.is_dir() and not (path / FILE_NAME).exists():
        raise EvaluationError(
            f"{path} has no {FILE_NAME}: give the folder that `python -m april_rl evaluate` has "
            "written"
        )
    path = path / FILE_NAME if path.is_dir() else path
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain["format"] != _FORMAT:
            raise EvaluationError(
                f"{path} has format {plain['format']}, this version reads {_FORMAT}; evaluate again"
            )
        sets = {name: _set_from(of_set) for name, of_set in plain["sets"].items()}
        return Report(settings=plain["settings"], sets=sets)
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(
            f"{path} was not written by `python -m april_rl evaluate` ({type(error).__name__}: "
            f"{error})"
        ) from error


def _set_from(plain: Mapping[str, Any]) -> SetReport:
    estimates = {key: Estimate(**found) for key, found in plain["estimates"].items()}
    prompts = tuple(PromptValues(**found) for found in plain["prompts"])
    sampling = SetSampling(**plain["sampling"])
    return SetReport(**{**plain, "estimates": estimates, "prompts": prompts, "sampling": sampling})


def difference(first: SetReport, second: SetReport) -> Difference:
    """Return second - first over the prompts of both.

    Prompts are matched by file name, row and answer; folders and templates may differ. Raises
    EvaluationError when they have none in common.
    """
    before, after = _by_identity(first.prompts), _by_identity(second.prompts)
    common = [identity for identity in before if identity in after]
    if not common:
        raise EvaluationError(
            f"{first.path} and {second.path} have no prompt in common: prompts are matched by "
            "file name, row and answer"
        )
    is_same_k = first.sampling.num_samples == second.sampling.num_samples
    keys = [
        key
        for key in first.estimates
        if key in second.estimates and (is_same_k or key not in _OF_K)
    ]
    changes = {
        key: paired_difference(
            [before[identity][key] for identity in common],
            [after[identity][key] for identity in common],
        )
        for key in keys
    }
    return Difference(len(common), changes, tuple(_notes(first.sampling, second.sampling)))


def _by_identity(prompts: Sequence[PromptValues]) -> dict[tuple[str, str], Mapping[str, float]]:
    return {(p.source.rpartition("/")[2], p.answer): p.values for p in prompts}


def _notes(first: SetSampling, second: SetSampling) -> list[str]:
    before, after = asdict(first), asdict(second)
    return [f"{key} {before[key]} → {after[key]}" for key in before if before[key] != after[key]]
