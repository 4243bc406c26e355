"""What a run leaves unfinished, as lines that hold everything a sample has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from april_rl.rollout.buffer import Buffer
from april_rl.types import Sample, ScoredGroup


def leftover_lines(buffer: Buffer, *, under_way: Sequence[ScoredGroup]) -> Iterator[str]:
    """One JSON object for every sample of every group that was not trained, the oldest group first.

    `state` is collected for those `under_way` to an update that failed, ready or parked for those
    of the buffer; completions carry token ids, behaviour log-probabilities, versions.
    """
    for state, groups in (
        ("collected", [scored.group.samples for scored in under_way]),
        ("ready", [scored.group.samples for scored in buffer.ready_groups()]),
        ("parked", [group.samples for group in buffer.open_groups()]),
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
        "completions": [
            {key: value for key, value in asdict(c).items() if key != "sample_id"}
            for c in sample.completions
        ],
    }
