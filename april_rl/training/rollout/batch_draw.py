"""Chooses the ready groups that a step trains: all that must be trained now, the rest at random.

Short responses are ready first, and groups that become ready together are alike. Batches of the
oldest groups would follow those waves: with α = 1.5 the mean response length of a batch deviated
twice as far as that of random draws of the same groups (docs/experiments.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from struct import pack

from april_rl.types import ScoredGroup


def draw_batch(
    ready: Sequence[ScoredGroup],
    open_versions: Mapping[int, int],
    *,
    num_groups: int,
    max_staleness: int,
    policy_version: int,
    seed: int,
) -> list[ScoredGroup]:
    """Return `num_groups` (N) of the ready groups, or all if there are fewer, oldest first.

    `ready` is sorted by the version of the oldest token of each group, and `open_versions` counts
    the open groups by that version. Of the groups whose oldest token is at most k steps from
    `max_staleness`, later steps can train k·N: the others are due now, the oldest first. The rest
    of the batch is drawn at random; the draw is a function of the seed, the version and the prompt.
    """
    num_due, versions = 0, [scored.group.oldest_version or 0 for scored in ready]
    for left in range(max_staleness + 1):
        latest = policy_version - max_staleness + left
        num_ready = bisect_right(versions, latest)
        num_open = sum(count for version, count in open_versions.items() if version <= latest)
        num_due = max(num_due, min(num_ready, num_ready + num_open - left * num_groups))
    num_due = min(num_due, num_groups)
    drawn = sorted(ready[num_due:], key=lambda scored: _lot(seed, policy_version, scored))
    chosen = {id(scored) for scored in (*ready[:num_due], *drawn[: num_groups - num_due])}
    return [scored for scored in ready if id(scored) in chosen]


def _lot(seed: int, policy_version: int, scored: ScoredGroup) -> bytes:
    drawn = pack("<qqq", seed, policy_version, scored.group.prompt.id)
    return blake2b(drawn, digest_size=8).digest()
