"""Counts how often math-verify and an exact comparison of plain numbers disagree, with examples.

math-verify accepts 0.333333 for 1/3 and 5 cm for 5 m, and rejects 10 % for 0.1. Which of that is
right depends on the data set, so the first examples are written to a file for the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from april_rl.metrics import Mean, Metrics
from april_rl.rewards.functions import MATH_VERIFY, RewardFunction
from april_rl.rewards.jobs import Disagreement, Verdict

MAX_EXAMPLES = 50
FILE_NAME = "verifier_disagreements.jsonl"


class DisagreementLog:
    """Counts disagreements, and writes each different one to
    samples/verifier_disagreements.jsonl.
    """

    def __init__(self, functions: Iterable[RewardFunction], *, folder: Path | None) -> None:
        """`folder` is the run directory; with None nothing is written."""
        self._names = {f.name for f in functions if f.function == MATH_VERIFY}
        self._path = None if folder is None else folder / "samples" / FILE_NAME
        self._written: set[Disagreement] = set()
        self._num_verified = self._num_disagreements = 0

    def note(self, verdicts: Iterable[Verdict]) -> None:
        """Count math-verify's verdicts and its disagreements."""
        for verdict in verdicts:
            self._num_verified += verdict.name in self._names
            if verdict.disagreement is not None:
                self._num_disagreements += 1
                self._write(verdict.disagreement)

    def metrics(self) -> Metrics:
        """Return the share of responses in dispute since the last call; nothing without
        responses.
        """
        num, of = self._num_disagreements, self._num_verified
        self._num_disagreements = self._num_verified = 0
        return Metrics({"reward/verify_disagreement_frac": Mean(num, of)} if of else {})

    def _write(self, found: Disagreement) -> None:
        if self._path is None or found in self._written or len(self._written) >= MAX_EXAMPLES:
            return
        self._written.add(found)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"expected": found.expected, "stated": found.stated, "math_verify": found.value}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
