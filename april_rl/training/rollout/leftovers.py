"""Untrained samples of a run, written as lines with all their data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from april_rl.types import Observation, Sample, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Every group that was not trained, as its samples, oldest group first."""

    collected: Sequence[Sequence[Sample]]  # samples of an update that failed
    ready: Sequence[Sequence[Sample]]
    parked: Sequence[Sequence[Sample]]

    def __bool__(self) -> bool:
        return bool(self.collected or self.ready or self.parked)

    @property
    def parked_tokens(self) -> int:
        return sum(sample.num_tokens for samples in self.parked for sample in samples)

    def __str__(self) -> str:
        parts = {
            f"parked ({self.parked_tokens} response tokens)": self.parked,
            "ready (rollout.drain_steps trains them)": self.ready,
            "of an update that did not end": self.collected,
        }
        counts = ", ".join(f"{len(groups)} {what}" for what, groups in parts.items() if groups)
        return f"groups: {counts}"

    def keep(self, path: Path) -> str:
        """Write `lines` to a file; return a sentence that says where, or why that failed: the run
        is ending, perhaps because the disk is full, and its own error is the one to show.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in self.lines())
        except OSError as error:
            return f"generated and not trained, and could not be saved ({error}): {self}"
        return f"generated and not trained, saved in {path}: {self}"

    def lines(self) -> Iterator[str]:
        """Yield a JSON object for every sample: its state (collected, ready, parked) and spans."""
        for state, groups in (
            ("collected", self.collected),
            ("ready", self.ready),
            ("parked", self.parked),
        ):
            for samples in groups:
                for sample in samples:
                    plain = {"state": state, **_plain(sample)}
                    yield json.dumps(plain, ensure_ascii=False, default=list)  # arrays


def _plain(sample: Sample) -> dict[str, object]:
    return {
        "prompt_id": sample.prompt.id,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "source": sample.prompt.source,
        "spans": [_plain_span(span) for span in sample.spans],
    }


def _plain_span(span: Span) -> dict[str, object]:
    if isinstance(span, Observation):
        return span._asdict()
    left_out = ("sample_id", "experts")
    return {key: value for key, value in asdict(span).items() if key not in left_out}
