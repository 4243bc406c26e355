"""When a step may end: with enough ready groups, if later steps can train the open ones in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from april_rl.errors import RunError
from april_rl.types import ScoredGroup


@dataclass(slots=True, kw_only=True)
class Lost:
    """Groups that a step has lost, including groups lost by scores that came before the step."""

    rejected: int = 0  # groups that the filter rejected
    dropped: int = 0  # groups that were dropped because a reward, environment or engine failed
    last_failure: str = ""  # why the last group was dropped

    @property
    def total(self) -> int:
        return self.rejected + self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A filter of scored groups, and the words for the user about a group that it rejects."""

    keep: Callable[[ScoredGroup], bool] = lambda _: True
    cause: str = "for equal rewards of all their samples"
    advice: str = (
        "the task is too easy or too hard for this model, or the reward is constant; nothing can "
        "be learned from it. python -m april_rl data shows what the reward gives right and wrong "
        "answers"
    )


def is_limit_reached(limit: int, lost: Lost) -> bool:
    """Return whether a step has lost as many groups as allowed; `limit` 0 means no limit."""
    return 0 < limit <= lost.total


def no_signal_error(lost: Lost, group_filter: Filter) -> RunError:
    """Return the error for a step that reached the limit with no group ready."""
    if lost.dropped > lost.rejected:
        return RunError(
            f"{lost.dropped} groups were dropped because a reward, environment or engine failed, "
            "and none is ready, so the step ended. The last failure: "
            f"{lost.last_failure}"
        )
    return RunError(
        f"{lost.rejected} groups were rejected {group_filter.cause} (a step ends after 20 · "
        f"trainer.num_groups), and none is ready: {group_filter.advice}"
    )


def lost_groups_notes(
    lost: Lost, group_filter: Filter, *, num_groups: int, num_wanted: int, limit: int
) -> list[str]:
    """Return notes on why groups were dropped, and that the limit made the batch smaller."""
    notes = []
    if lost.dropped:
        notes.append(
            f"{lost.dropped} groups dropped because a reward, environment or engine failed; "
            f"the last: {lost.last_failure}"
        )
    if num_groups < num_wanted and is_limit_reached(limit, lost):
        notes.append(
            f"this step trains {num_groups} groups instead of {num_wanted}: {lost.rejected} were "
            f"rejected {group_filter.cause}, {lost.dropped} dropped"
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
    trains `num_groups` (N), due ones first, so at most k·N of those may be left (the condition of
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
