"""Metrics of a step for each source of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

from april_rl.metrics import Mean, Metric, Metrics, Sum
from april_rl.types import ScoredGroup


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
