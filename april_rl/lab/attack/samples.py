"""Searches the saved samples of a run for responses that were paid and should not have been."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from april_rl.lab.report.run_files import read_run

_MIN_CHARACTERS = 500  # the ratio of a shorter text says little
_REPEATED = 12.0  # times that zlib makes a text smaller; prose is at 2 to 4
_SHOWN = 80  # characters of a response


def search_run(run_dir: Path) -> list[str]:
    """Return a line for each suspicious response in a run's files. Raise ReportError."""
    return [
        f"{run_dir}, step {step}, {line}"
        for step, records in read_run(run_dir).all_samples()
        for line in suspicious(records)
    ]


def suspicious(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each text that was paid like the best for prompts with different answers,
    and for each that repeats a few words.
    """
    rewards = [record["reward"] for record in records]
    middle = (min(rewards, default=0.0) + max(rewards, default=0.0)) / 2
    answers = defaultdict(set)
    for record in records:
        if record["reward"] > middle:
            answers[record["response"].strip()].add(record["answer"])
    for text, found in answers.items():
        if len(found) > 1:
            yield f"paid for {len(found)} different right answers: {text[:_SHOWN]!r}"
        times = len(text.encode()) / len(zlib.compress(text.encode()))
        if len(text) >= _MIN_CHARACTERS and times > _REPEATED:
            yield f"paid for a text that repeats itself {times:.0f} times: {text[-_SHOWN:]!r}"
