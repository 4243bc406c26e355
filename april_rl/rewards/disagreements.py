"""How often math-verify and an exact comparison of plain numbers disagree, with examples.

math-verify takes 0.333333 for 1/3 and 5 cm for 5 m, and does not take 10 % for 0.1: which of that
is right depends on the data set, so the first examples are written for people to look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from april_rl.metrics import Mean, Metrics
from april_rl.rewards.functions import MATH_VERIFY, RewardFunction
from april_rl.rewards.jobs import Disagreement, Verdict

MOST_EXAMPLES = 50
FILE_NAME = "verifier_disagreements.jsonl"


class DisagreementLog:
    """Counts disagreements, and writes different ones to samples/verifier_disagreements.jsonl."""

    def __init__(self, functions: Iterable[RewardFunction], *, folder: Path | None) -> None:
        """`folder` is the run directory; None: nothing is written."""
        self._names = {f.name for f in functions if f.function == MATH_VERIFY}
        self._path = None if folder is None else folder / "samples" / FILE_NAME
        self._written: set[Disagreement] = set()
        self._num_verified = self._num_disagreements = 0

    def note(self, verdicts: Iterable[Verdict]) -> None:
        """Count what math-verify said among the verdicts of the functions."""
        for verdict in verdicts:
            self._num_verified += verdict.name in self._names
            if verdict.disagreement is not None:
                self._num_disagreements += 1
                self._write(verdict.disagreement)

    def metrics(self) -> Metrics:
        """Return the share of responses since the last call; nothing when there were none."""
        num, of = self._num_disagreements, self._num_verified
        self._num_disagreements = self._num_verified = 0
        return Metrics({"reward/verify_disagreement_frac": Mean(num, of)} if of else {})

    def _write(self, found: Disagreement) -> None:
        if self._path is None or found in self._written or len(self._written) >= MOST_EXAMPLES:
            return
        self._written.add(found)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"expected": found.expected, "stated": found.stated, "math_verify": found.value}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
