"""The results: the JSON, the page in Markdown, and the calibrated learner.max_mismatch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from acceptance.session import Machine, Part, Row

# learner.max_mismatch is set to this many times the largest measured mismatch of a step: far enough
# above it for a warning to mean something. A step above five times the limit is skipped.
MISMATCH_FACTOR = 4.0
_ON_GPU = (
    "What was expected is an estimate: a line marked **look** deserves a look; it is not an error. "
    "`failed` parts do not work."
)
_WITHOUT_GPU = (
    "This machine has no GPU. Sizes are tiny, and only what holds on any machine is compared: the "
    "page shows that the parts run, and nothing about the speed of a GPU."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one part."""

    status: str  # done, skipped or failed
    took_s: float
    reason: str = ""  # why the part was skipped or failed
    rows: tuple[Row, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


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
            "max_mismatch": calibrate(self.outcomes),
            "parts": {name: asdict(outcome) for name, outcome in self.outcomes.items()},
        }
        speeds = calibration(self.outcomes)
        if speeds is not None:
            path = self.folder / "calibration.json"
            path.write_text(json.dumps(speeds, indent=1) + "\n", encoding="utf-8")
        unfinished = self.json_path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(self.json_path)
        text = "\n".join(page(self, parts)) + "\n"
        self.page_path.write_text(text, encoding="utf-8")


def calibrate(outcomes: Mapping[str, Outcome]) -> float | None:
    """Return MISMATCH_FACTOR times the largest mismatch of a step of the smoke recipe, rounded up
    to one digit, in nats; None if it has not run with real weights.
    """
    smoke = outcomes.get("smoke")
    if smoke is None or smoke.status != "done" or smoke.values["weights"].startswith("random"):
        return None
    limit = MISMATCH_FACTOR * max(smoke.values["mismatch"])
    digit = 10.0 ** math.floor(math.log10(limit))
    return float(f"{math.ceil(limit / digit - 1e-9) * digit:.0e}")


def calibration(outcomes: Mapping[str, Outcome]) -> dict[str, Any] | None:
    """Return what predictions read in place of their assumptions, in the units that
    `april_rl.lab.simulator.calibration` names; None until `learner` and `engine` are done.
    """
    found = [outcomes.get(name) for name in ("learner", "engine")]
    learner, engine = (each.values if each and each.status == "done" else None for each in found)
    if learner is None or engine is None:
        return None
    sync = engine["sync"]
    return {
        "device": engine["device"],
        **{key: engine[key] for key in _SPEEDS},
        "update_flops_per_s": learner["tflops"] * 1e12,
        "sync_bytes_per_s": sync["bytes"] / (sync["gather_s"] + sync["load_s"]),
    }


_SPEEDS = ("decode_bytes_per_s", "between_steps_s", "prefill_flops_per_s", "asleep_gib")


def page(results: Results, parts: Sequence[Part]) -> Iterator[str]:
    """Yield the lines of the page."""
    machine, outcomes = results.machine, results.outcomes
    shown = [part for part in parts if part.name in outcomes]
    yield from (f"# Acceptance of {machine.count} × {machine.name}", "")
    yield from (_ON_GPU if machine.is_gpu else _WITHOUT_GPU, "")
    yield from ("What each part does and how to read its lines: docs/gpu.md.", "")
    yield from ("| part | result | took |", "|---|---|--:|")
    for part in shown:
        outcome = outcomes[part.name]
        looks = sum(row.is_as_expected is False for row in outcome.rows)
        result = f"{outcome.status}, **look** at {looks} of its lines" if looks else outcome.status
        reason = f": {_cell(outcome.reason)}" if outcome.reason else ""
        yield f"| [{part.title}](#{part.name}) | {result}{reason} | {outcome.took_s:.0f} s |"
    yield from ("", "## What to set", "")
    for part in shown:
        for row in outcomes[part.name].rows:
            if row.setting:
                yield f"- `{row.setting}` ({part.title}: {row.quantity}, {row.measured})"
    yield _limit_line(calibrate(outcomes))
    if calibration(outcomes) is not None:
        path = results.folder / "calibration.json"
        yield f"- `python -m april_rl rehearse +recipe=NAME calibration={path}` predicts with these"
    for part in shown:
        yield from ("", *_section(part, outcomes[part.name]))


def _limit_line(limit: float | None) -> str:
    if limit is None:
        return (
            "- `learner.max_mismatch=0.05`, the default. Random weights say nothing about it: let "
            "`parts=smoke` run where the hub can be reached"
        )
    return (
        f"- `learner.max_mismatch={limit:g}` ({MISMATCH_FACTOR:g} × the largest mismatch of a step "
        "of smoke, rounded up to one digit): another model or precision needs its own"
    )


def _section(part: Part, outcome: Outcome) -> Iterator[str]:
    yield f'<a id="{part.name}"></a>'
    yield from ("", f"## {part.title[0].upper()}{part.title[1:]}", "")
    if outcome.reason:
        yield f"{outcome.status}: {_cell(outcome.reason)}"
        return
    yield from ("| what | expected | measured | | what it means |", "|---|---|---|---|---|")
    for row in outcome.rows:
        mark = {None: "", True: "ok", False: "**look**"}[row.is_as_expected]
        cells = (row.quantity, row.expected, row.measured, mark, row.meaning)
        yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
