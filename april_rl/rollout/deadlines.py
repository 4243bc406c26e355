"""Which groups a step has to wait for, so that none is trained beyond the staleness cap."""

from __future__ import annotations

from collections.abc import Mapping


def must_wait(
    *,
    open_versions: Mapping[int, int],
    ready_versions: Mapping[int, int],
    num_groups: int,
    oldest_allowed: int,
    policy_version: int,
) -> bool:
    """Whether a step of `policy_version` that ended now would leave more groups than later steps
    can train in time.

    `open_versions`, `ready_versions`: how many groups have their oldest token of which version. One
    of `oldest_allowed` has to be trained
    now, one of `oldest_allowed` + k within k more steps. A step trains `num_groups` (N), the oldest
    first, so at most k·N of those may be left (the condition of earliest-due-date scheduling,
    Jackson 1955). Waiting for open ones helps while fewer than N of them are ready; it always
    succeeds when there are never more than N·(policy_version - oldest_allowed + 1) groups.
    """
    for version in range(oldest_allowed, policy_version + 1):
        num_ready = _up_to(version, ready_versions)
        num_open = _up_to(version, open_versions)
        if num_ready < num_groups and num_open > (version - oldest_allowed) * num_groups:
            return True
    return False


def _up_to(version: int, versions: Mapping[int, int]) -> int:
    return sum(count for oldest, count in versions.items() if oldest <= version)
