"""Which groups a step has to wait for, so that none is trained beyond the staleness cap."""

from __future__ import annotations

from collections.abc import Sequence


def must_wait(
    *,
    open_versions: Sequence[int],
    ready_versions: Sequence[int],
    num_groups: int,
    oldest_allowed: int,
    policy_version: int,
) -> bool:
    """Whether a step of `policy_version` that ended now would leave more groups than later steps
    can train in time.

    A group counts with the version of its oldest token. One of `oldest_allowed` has to be trained
    now, one of `oldest_allowed` + k within k more steps. A step trains `num_groups` (N), the oldest
    first, so at most k·N of those may be left (the condition of earliest-due-date scheduling,
    Jackson 1955). Waiting for open ones helps while fewer than N of them are ready; it always
    succeeds when there are never more than N·(policy_version - oldest_allowed + 1) groups.
    """
    for version in range(oldest_allowed, policy_version + 1):
        num_ready = sum(ready <= version for ready in ready_versions)
        num_open = sum(open_ <= version for open_ in open_versions)
        if num_ready < num_groups and num_open > (version - oldest_allowed) * num_groups:
            return True
    return False
