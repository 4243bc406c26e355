"""Metrics of a step's rewards, in total and by reward function.

`reward/mean` is the mean of the rewards, before the overlong penalty that advantages are computed
with. With several functions each has `reward/FUNCTION/mean`, before its weight, and with several
sources `source/SOURCE/reward/FUNCTION/mean`; the reward is `source/SOURCE/reward_mean` by source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from april_rl.metrics import Histogram, Mean, Metrics
from april_rl.types import ScoredGroup


def reward_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """Return the `reward/*` metrics of the groups that a step trains."""
    values: dict[str, list[float]] = defaultdict(list)
    for scored in groups:
        values["reward/mean"] += scored.rewards
        source = scored.group.prompt.dataset
        for name, value in chain.from_iterable(scored.parts):
            values[f"reward/{name}/mean"].append(value)
            if source:
                values[f"source/{source}/reward/{name}/mean"].append(value)
    return Metrics(
        {
            **{key: Mean(sum(of_key), len(of_key)) for key, of_key in values.items()},
            "reward/std": float(np.std(values["reward/mean"])),
            "histogram/reward": Histogram.of(values["reward/mean"]),
        }
    )
