"""Rewards and environments behind one port, with one place to wait for both."""

from __future__ import annotations

from april_rl.environments.pool import EnvironmentPool
from april_rl.metrics import Metrics
from april_rl.rewards.pool import RewardPool
from april_rl.types import Reply, Sample, Score


class RewardsAndEnvironments:
    """A `rollout.ports.Outside` over a pool of rewards and one of environments, which share a
    mailbox.
    """

    def __init__(self, rewards: RewardPool, environments: EnvironmentPool) -> None:
        """Take both; the caller closes them."""
        self._rewards, self._environments = rewards, environments

    def submit(self, sample: Sample, *, group_size: int) -> None:
        """Score a finished sample, whose episode is over."""
        self._environments.let_go(sample.id)
        self._rewards.submit(sample, group_size=group_size)

    def act(self, sample: Sample) -> None:
        """Let the environment of a sample answer its last turn, or begin."""
        self._environments.act(sample)

    def collect(self, timeout_s: float | None) -> list[Score | Reply]:
        """Return scores and replies as `rollout.ports.Outside` says."""
        return self._rewards.mailbox.collect((self._rewards, self._environments), timeout_s)

    def save(self) -> dict[str, str]:
        """Return the states of rewards, for a checkpoint that is written now."""
        self._environments.notes.saved()
        return self._rewards.save()

    def evaluated(self) -> None:
        """Note that an evaluation of all sets has ended."""
        self._environments.notes.evaluated()

    def metrics(self) -> Metrics:
        """Return `reward/*` and `environment/*`, counted since the last call."""
        return Metrics({**self._rewards.metrics(), **self._environments.metrics()})
