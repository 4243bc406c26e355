"""When a step may end: with enough ready groups, and no open groups that later steps could not
train in time.
"""

from __future__ import annotations

from collections.abc import Mapping

from april_rl.errors import RunError
from april_rl.rollout.stats import StepStats


class NoSignalError(RunError):
    """A step lost as many groups as it may, and none is ready for training."""


def is_limit_reached(limit: int, stats: StepStats) -> bool:
    """Return whether a step has lost as many groups as it may; `limit` 0 means no limit."""
    return 0 < limit <= stats.rejected_groups + stats.dropped_groups


def no_signal_error(stats: StepStats, last_failure: str) -> NoSignalError:
    """Return the error for a step that reached the limit with no group ready."""
    if stats.dropped_groups > stats.rejected_groups:
        return NoSignalError(
            f"{stats.dropped_groups} groups were dropped because a reward or an engine failed, and "
            f"none is ready (rollout.max_rejected_groups). The last failure: {last_failure}"
        )
    return NoSignalError(
        f"{stats.rejected_groups} groups had equal rewards for all their samples "
        "(rollout.max_rejected_groups): the task is too easy or too hard for this model, "
        "or the reward is constant; nothing can be learned from it"
    )


def lost_groups_notes(
    stats: StepStats, *, num_groups: int, num_wanted: int, limit: int, last_failure: str
) -> list[str]:
    """Return notes for the user on lost groups: why groups were dropped, and that the limit made
    the batch smaller.
    """
    notes = []
    if stats.dropped_groups:
        notes.append(
            f"{stats.dropped_groups} groups dropped because a reward or an engine failed; the "
            f"last: {last_failure}"
        )
    if num_groups < num_wanted and is_limit_reached(limit, stats):
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
    """Return whether ending a step of `policy_version` now would leave more groups than later steps
    can train in time.

    `open_versions` and `ready_versions` count groups by the version of their oldest token. A group
    of `oldest_allowed` must be trained now, one of `oldest_allowed` + k within k more steps. A step
    trains `num_groups` (N), oldest first, so at most k·N of those may be left (the condition of
    earliest-due-date scheduling, Jackson 1955). Waiting for open groups helps while fewer than N of
    them are ready. It always succeeds if there are never more than N·(policy_version -
    oldest_allowed + 1) groups.
    """
    for version in range(oldest_allowed, policy_version + 1):
        num_ready = _up_to(version, ready_versions)
        num_open = _up_to(version, open_versions)
        if num_ready < num_groups and num_open > (version - oldest_allowed) * num_groups:
            return True
    return False


def _up_to(version: int, versions: Mapping[int, int]) -> int:
    return sum(count for oldest, count in versions.items() if oldest <= version)
