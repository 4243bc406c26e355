"""The results of tools/gpu_acceptance.py: the JSON, the page in Markdown, and the calibrated
learner.max_mismatch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from acceptance_session import Machine, Row

# learner.max_mismatch is this many times the largest measured mismatch of a step: far enough above
# it for a warning to mean something. A step above five times the limit is skipped.
MISMATCH_FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one part."""

    status: str  # done, skipped or failed
    took_s: float
    reason: str = ""  # of skipped and failed
    rows: tuple[Row, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Name, title and duration of a part, as the page shows them."""

    name: str
    title: str
    minutes: float  # on a GPU


@dataclass(slots=True, kw_only=True)
class Results:
    """All outcomes so far, kept in the output folder."""

    folder: Path
    machine: Machine
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, machine: Machine) -> Results:
        """Return the results of earlier starts; raise ValueError if another machine wrote them."""
        results = cls(folder=folder, machine=machine)
        if not results.json_path.is_file():
            return results
        found = json.loads(results.json_path.read_text(encoding="utf-8"))
        if (found["device"], found["count"]) != (machine.name, machine.count):
            raise ValueError(
                f"{results.json_path} has results of {found['count']} × {found['device']}, and "
                f"this machine has {machine.count} × {machine.name}: give another output=FOLDER"
            )
        for name, outcome in found["parts"].items():
            rows = tuple(Row(**row) for row in outcome.pop("rows"))
            results.outcomes[name] = Outcome(**outcome, rows=rows)
        return results

    @property
    def json_path(self) -> Path:
        """Return the path of the JSON file."""
        return self.folder / "acceptance.json"

    @property
    def page_path(self) -> Path:
        """Return the path of the page."""
        return self.folder / "acceptance.md"

    def write(self, parts: Sequence[Part]) -> None:
        """Write both files."""
        everything = {
            "device": self.machine.name,
            "count": self.machine.count,
            "max_mismatch": calibrated(self.outcomes),
            "weights": _weights(self.outcomes),
            "parts": {
                part.name: asdict(self.outcomes[part.name])
                for part in parts
                if part.name in self.outcomes
            },
        }
        unfinished = self.json_path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(self.json_path)
        text = "\n".join(page(self, parts)) + "\n"
        self.page_path.write_text(text, encoding="utf-8")


def calibrated(outcomes: Mapping[str, Outcome]) -> float | None:
    """Return MISMATCH_FACTOR times the largest mismatch of a step, rounded up to one digit, in
    nats; None when no part has measured one.
    """
    largest = max(_mismatches(outcomes), default=0.0)
    if not largest:
        return None
    limit = MISMATCH_FACTOR * largest
    digit = 10.0 ** math.floor(math.log10(limit))
    return float(f"{math.ceil(limit / digit - 1e-9) * digit:.0e}")


def _mismatches(outcomes: Mapping[str, Outcome]) -> list[float]:
    """Return the mismatch of each step: of the smoke recipe if it had real weights, else of every
    run.
    """
    if not _weights(outcomes).startswith("random"):
        outcomes = {"smoke": outcomes["smoke"]}
    return [value for outcome in outcomes.values() for value in outcome.values.get("mismatch", ())]


def _weights(outcomes: Mapping[str, Outcome]) -> str:
    """Return which weights the smoke recipe ran with."""
    smoke = outcomes.get("smoke")
    weights: str = smoke.values.get("weights", "random") if smoke else "random"
    return weights


def page(results: Results, parts: Sequence[Part]) -> Iterator[str]:
    """Yield the lines of the page."""
    machine, outcomes = results.machine, results.outcomes
    shown = [part for part in parts if part.name in outcomes]
    yield f"# Acceptance of {machine.count} × {machine.name}"
    yield ""
    yield from _introduction(machine)
    yield from _summary(shown, outcomes)
    yield from _settings(shown, outcomes)
    for part in shown:
        yield from _section(part, outcomes[part.name])


def _introduction(machine: Machine) -> Iterator[str]:
    if machine.is_gpu:
        yield (
            "What was expected was estimated before this program had run on any GPU: a line marked "
            "**look** calls for a look, not for an alarm. `failed` is what does not work."
        )
    else:
        yield (
            "This machine has no GPU. Sizes are tiny, and only what holds on any machine is "
            "compared: the page shows that the parts run, and nothing about the speed of a GPU."
        )
    yield ""
    yield "What each part does and how to read its lines: docs/gpu.md."
    yield ""


def _summary(parts: Sequence[Part], outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    yield "| part | result | took |"
    yield "|---|---|--:|"
    for part in parts:
        outcome = outcomes[part.name]
        looks = sum(row.is_as_expected is False for row in outcome.rows)
        result = outcome.status
        if looks:
            result += f", **look** at {looks} line{'s' if looks > 1 else ''}"
        if outcome.reason:
            result += f": {_cell(outcome.reason)}"
        yield f"| [{part.title}](#{part.name}) | {result} | {outcome.took_s:.0f} s |"
    yield ""


def _settings(parts: Sequence[Part], outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the settings to use, each with its reason."""
    lines = [
        f"- `{row.setting}` ({part.title}: {row.quantity}, {row.measured})"
        for part in parts
        for row in outcomes[part.name].rows
        if row.setting
    ]
    limit = calibrated(outcomes)
    if limit is not None:
        lines.append(_limit_line(limit, outcomes))
    if lines:
        yield from ("## What to set", "", *lines, "")


def _limit_line(limit: float, outcomes: Mapping[str, Outcome]) -> str:
    """Return the line on learner.max_mismatch: the calibrated limit if weights were real, else how
    to get one.
    """
    values = _mismatches(outcomes)
    how = (
        f"{MISMATCH_FACTOR:g} × the largest mismatch of a step, {max(values):.4f} nats in "
        f"{len(values)} steps, rounded up to one digit"
    )
    weights = _weights(outcomes)
    if weights.startswith("random"):
        return (
            f"- `learner.max_mismatch=0.05`, the default. These parts would say {limit:g} ({how}), "
            "but of random weights, whose logits are small. A trained model's are larger and are "
            "rounded more coarsely: let `parts=smoke` run where the hub can be reached, or take "
            f"{MISMATCH_FACTOR:g} × the largest mismatch/logprob_abs_mean of your own run"
        )
    return (
        f"- `learner.max_mismatch={limit:g}`: {how}. A run warns above it and skips a step above "
        f"five times it. Measured with {weights}; another model or precision needs its own"
    )


def _section(part: Part, outcome: Outcome) -> Iterator[str]:
    yield f'<a id="{part.name}"></a>'
    yield ""
    yield f"## {part.title[0].upper()}{part.title[1:]}"
    yield ""
    if outcome.reason:
        yield f"{outcome.status}: {_cell(outcome.reason)}"
        yield ""
        return
    yield "| what | expected | measured | | what it means |"
    yield "|---|---|---|---|---|"
    for row in outcome.rows:
        mark = {None: "", True: "ok", False: "**look**"}[row.is_as_expected]
        cells = (row.quantity, row.expected, row.measured, mark, row.meaning)
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
