"""Metrics of a step's rewards: in total, by reward function and by source of a mixture.

`reward/mean` is the mean of the rewards, before the overlong penalty that advantages are computed
with. With several functions each has `reward/FUNCTION/mean`, before its weight, and with several
sources `source/SOURCE/reward/FUNCTION/mean`; the total by source is `source/SOURCE/reward_mean`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from april_rl.metrics import Histogram, Mean, Metric, Metrics, Sum
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


def source_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """Return `source/<name>/*` of the trained groups; nothing if there is a single set.

    `reward_mean` is over samples, `groups` is a count, and `no_signal_frac` is the share of groups
    whose rewards are all equal.
    """
    by_source: dict[str, list[ScoredGroup]] = {}
    for scored in groups:
        by_source.setdefault(scored.group.prompt.dataset, []).append(scored)
    by_source.pop("", None)  # a single set has no name
    values: dict[str, Metric | float] = {}
    for name, scored_groups in sorted(by_source.items()):
        rewards = [reward for scored in scored_groups for reward in scored.rewards]
        num_flat = sum(not scored.has_signal for scored in scored_groups)
        values |= {
            f"source/{name}/reward_mean": Mean(sum(rewards), len(rewards)),
            f"source/{name}/groups": Sum(len(scored_groups)),
            f"source/{name}/no_signal_frac": Mean(num_flat, len(scored_groups)),
        }
    return Metrics(values)
