"""When a step may end: with enough ready groups, and none left that later steps could not train in
time.
"""

from __future__ import annotations

from collections.abc import Mapping

from april_rl.errors import RunError
from april_rl.rollout.stats import StepStats


class NoSignalError(RunError):
    """A step generated group after group, and there is none to train."""


def is_reached(limit: int, stats: StepStats) -> bool:
    """Whether a step has lost as many groups as it may; `limit` 0: there is no bound."""
    return 0 < limit <= stats.rejected_groups + stats.dropped_groups


def nothing_to_train(stats: StepStats, last_failure: str) -> NoSignalError:
    """What to say when the bound is reached with no group ready."""
    if stats.dropped_groups > stats.rejected_groups:
        return NoSignalError(
            f"{stats.dropped_groups} groups were dropped because their reward failed, and none is "
            f"ready (rollout.max_rejected_groups). The last failure: {last_failure}"
        )
    return NoSignalError(
        f"{stats.rejected_groups} groups had equal rewards for all their samples "
        "(rollout.max_rejected_groups): the task is too easy or too hard for this model, "
        "or the reward is constant; nothing can be learned from it"
    )


def notes_of(
    stats: StepStats, *, num_groups: int, num_wanted: int, limit: int, last_failure: str
) -> list[str]:
    """What a person should know of the groups a step lost: that some were dropped, and why; that
    the bound made its batch smaller.
    """
    notes = []
    if stats.dropped_groups:
        notes.append(
            f"{stats.dropped_groups} groups dropped because their reward failed; the last: "
            f"{last_failure}"
        )
    if num_groups < num_wanted and is_reached(limit, stats):
        notes.append(
            f"this step trains {num_groups} groups instead of {num_wanted}: "
            f"{stats.rejected_groups} were rejected for equal rewards, {stats.dropped_groups} "
            "dropped (rollout.max_rejected_groups)"
        )
    return notes


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
