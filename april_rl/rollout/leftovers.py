"""What a run leaves unfinished, as lines that hold everything a sample has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from april_rl.rollout.buffer import Buffer
from april_rl.types import Sample


def leftover_lines(buffer: Buffer) -> Iterator[str]:
    """One JSON object for every sample of every group that was not trained, the oldest group first.

    `state` is parked or ready; completions carry token ids, behaviour log-probabilities, versions.
    """
    for state, groups in (
        ("ready", [scored.group.samples for scored in buffer.ready_groups()]),
        ("parked", [group.samples for group in buffer.open_groups()]),
    ):
        for samples in groups:
            for sample in samples:
                yield json.dumps({"state": state, **_plain(sample)}, ensure_ascii=False)


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
