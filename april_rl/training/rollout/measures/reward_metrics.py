"""Metrics of a step's rewards: in total, by reward function and by source of a mixture.

`reward/mean` is the mean of the rewards, before the overlong penalty that advantages are computed
with. With several functions each has `reward/FUNCTION/mean`, before its weight, and with several
sources `source/SOURCE/reward/FUNCTION/mean`; the total by source is `source/SOURCE/reward_mean`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from april_rl.metrics import Histogram, Mean, Metrics, Sum
from april_rl.types import ScoredGroup


def reward_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """Return `reward/*` and, of several sources, `source/<name>/*` of the groups that a step
    trains. `groups` is a count, and `no_signal_frac` the share of groups with equal rewards.
    """
    values: dict[str, list[float]] = defaultdict(list)
    num_groups: Counter[str] = Counter()
    for scored in groups:
        values["reward/mean"] += scored.rewards
        source = scored.group.prompt.dataset  # a single set has no name
        if source:
            values[f"source/{source}/reward_mean"] += scored.rewards
            values[f"source/{source}/no_signal_frac"].append(not scored.has_signal)
            num_groups[f"source/{source}/groups"] += 1
        for name, value in chain.from_iterable(scored.parts):
            values[f"reward/{name}/mean"].append(value)
            if source:
                values[f"source/{source}/reward/{name}/mean"].append(value)
    return Metrics(
        {
            **{key: Mean(sum(of_key), len(of_key)) for key, of_key in values.items()},
            **{key: Sum(count) for key, count in num_groups.items()},
            "reward/std": float(np.std(values["reward/mean"])),
            "histogram/reward": Histogram.of(values["reward/mean"]),
        }
    )
