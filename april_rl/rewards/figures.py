"""What a step's rewards were, in total and by reward function.

`reward/mean` is of the value that trains. Several functions have `reward/FUNCTION/mean` each,
before their weights, and with several sources `source/SOURCE/reward/FUNCTION/mean`; the value that
trains is by source in `source/SOURCE/reward_mean`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from april_rl.metrics import Mean, Metrics
from april_rl.types import ScoredGroup


def reward_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """Return the `reward/*` of the groups that are trained in a step."""
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
        }
    )
