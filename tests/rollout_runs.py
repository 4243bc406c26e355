"""Runs of the real collector on fakes, with independent bookkeeping of every prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from fake_engine import (
    FakeEngines,
    FakePrompts,
    FakeScorer,
    LengthDistribution,
    logprob,
    reward,
    token,
)
from hypothesis import strategies as st

from april_rl.algorithm.age import age_weights, decay
from april_rl.algorithm.aggregation import token_mean
from april_rl.batch.packing import Batch, Packer
from april_rl.rollout.collector import Collection, Collector
from april_rl.rollout.dispatch import RequestRules
from april_rl.rollout.over_sampling import FixedFactor, OverSampling
from april_rl.rollout.ports import Engines
from april_rl.rollout.record import GroupState
from april_rl.rollout.step import StepRules
from april_rl.types import Group, Sample, SampleId, ScoredGroup


def constant(length: int) -> LengthDistribution:
    """Return a distribution in which every response has `length` tokens."""
    return lambda _: length


def lognormal(median: float, sigma: float) -> LengthDistribution:
    """Return a long-tailed distribution; a length is a function of the sample."""

    def length_of(sample_id: SampleId) -> int:
        z = math.sin(sample_id.prompt_id * 12.9898 + sample_id.index * 78.233) * 43758.5453
        u = min(max(z - math.floor(z), 0.01), 0.99)
        return max(1, round(median * math.exp(sigma * math.log(u / (1 - u)))))

    return length_of


def extreme(every: int) -> LengthDistribution:
    """Return one token, but an endless response for one sample in `every`."""
    return lambda s: 10**9 if (s.prompt_id + 3 * s.index) % every == 0 else 1


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a run; the defaults are a plain one with partial rollouts."""

    num_groups: int = 3
    group_size: int = 2
    alpha: float = 1.5
    refill: bool = True
    num_engines: int = 1
    tick_steps: int = 4
    budget: int = 40
    length_of: LengthDistribution = field(default_factory=lambda: lognormal(8, 0.6))
    delay: int = 0
    reject_every: int = 0  # prompts whose id it divides are rejected; 0: none
    failing: frozenset[int] = frozenset()
    stuck: frozenset[int] = frozenset()
    by_group: bool = False  # the scorer wants whole groups
    max_staleness: int = 5
    finish_stale: bool = True
    max_rejected_groups: int = 1000
    deterministic: bool = False
    seed: int = 0
    keeps: bool = False  # engines hold the state of what they abort
    computes_on: bool = True  # the engines, before they abort

    @property
    def num_slots(self) -> int:
        return round(self.alpha * self.num_groups * self.group_size)


class Run:
    """A collector on fakes, and the fate of every prompt."""

    def __init__(
        self,
        setup: Setup,
        engines: Engines | None = None,
        *,
        prompts: FakePrompts | None = None,
        over_sampling: OverSampling | None = None,
    ) -> None:
        self.setup = setup
        self.fakes = FakeEngines(
            setup.length_of,
            num_engines=setup.num_engines,
            budget=setup.budget,
            keeps=setup.keeps,
            computes_on=setup.computes_on,
        )
        self.scorer = FakeScorer(
            delay=setup.delay,
            failing=setup.failing,
            stuck=setup.stuck,
            by_group=setup.by_group,
        )
        self.prompts = prompts or FakePrompts()
        self.version = 0
        self.trained: list[ScoredGroup] = []
        self.rejected: list[ScoredGroup] = []
        self.collector = Collector(
            engines or self.fakes,
            self.scorer,
            self.prompts,
            StepRules(
                num_groups=setup.num_groups,
                group_size=setup.group_size,
                refill=setup.refill,
                max_staleness=setup.max_staleness,
                finish_stale=setup.finish_stale,
                max_rejected_groups=setup.max_rejected_groups,
                abort_timeout_s=7.0,
                tick_timeout_s=9.0,
                deterministic=setup.deterministic,
                requests=RequestRules(
                    tick_steps=setup.tick_steps, max_response_tokens=setup.budget, seed=setup.seed
                ),
            ),
            clock=self.fakes.clock,
            over_sampling=over_sampling or FixedFactor(setup.alpha),
            keep=self._keep,
        )
        self.buffer = self.collector._buffer

    def _keep(self, scored: ScoredGroup) -> bool:
        every = self.setup.reject_every
        is_rejected = every > 0 and scored.group.prompt.id % every == 0
        if is_rejected:
            self.rejected.append(scored)
        return not is_rejected

    def step(self, *, may_open: bool = True) -> Collection:
        """Collect with the next policy version."""
        self.fakes.set_version(self.version)
        collection = self.collector.collect(self.version, may_open=may_open)
        self.trained += collection.groups
        self.version += 1
        return collection

    def steps(self, number: int) -> list[tuple[ScoredGroup, ...]]:
        """Run `number` steps; return the groups of each."""
        return [self.step().groups for _ in range(number)]

    def drain(self) -> None:
        """Run steps that open no prompts, until nothing is left to train."""
        while self.step(may_open=False).groups:
            pass

    def pack(self, groups: tuple[ScoredGroup, ...]) -> Batch:
        """Pack the groups of the last step for two ranks."""
        longest = 3 + self.setup.budget
        packer = Packer(
            num_ranks=2,
            max_tokens=2 * longest,
            num_minibatches=1,
            max_staleness=self.setup.max_staleness,
            max_response_tokens=self.setup.budget,
            age_weights=partial(age_weights, weight_of_age=decay(1.0)),
            aggregation=token_mean,
            hidden_size=64,
        )
        ones = [np.ones(self.setup.group_size)] * len(groups)
        return packer.pack(groups, ones, policy_version=self.version - 1)

    # The test's own bookkeeping.

    @property
    def alive(self) -> list[Sample]:
        """Return every sample in the buffer."""
        open_ = [sample for group in self.buffer.open_groups() for sample in group.samples]
        return open_ + [s for scored in self.buffer.ready_groups() for s in scored.group.samples]

    def num_dropped(self) -> int:
        """Opened prompts that are nowhere else; they must be those whose reward fails."""
        gone = set(self.prompts.taken) - {sample.prompt.id for sample in self.alive}
        gone -= {scored.group.prompt.id for scored in self.trained + self.rejected}
        assert gone <= self.setup.failing, f"prompts {gone} vanished"
        return len(gone)

    def num_tokens_held(self) -> int:
        """Return the response tokens of all samples ever opened."""
        groups = [scored.group for scored in self.trained + self.rejected]
        held = self.alive + [sample for group in groups for sample in group.samples]
        known = {sample.prompt.id for sample in held}
        length_of, budget = self.setup.length_of, self.setup.budget
        dropped = sum(
            min(length_of(SampleId(prompt_id, index)), budget)
            for prompt_id in set(self.prompts.taken) - known
            for index in range(self.setup.group_size)
        )
        return dropped + sum(sample.num_tokens for sample in held)


def check_counts(run: Run) -> None:
    """Compare what the buffer counts between two steps with the test's own bookkeeping."""
    assert run.buffer.counts() == {
        GroupState.in_flight: 0,
        GroupState.parked: len(list(run.buffer.open_groups())),
        GroupState.ready: len(run.buffer.ready_groups()),
        GroupState.trained: len(run.trained),
        GroupState.rejected: len(run.rejected),
        GroupState.dropped: run.num_dropped(),
    }
    assert run.buffer.metrics().read()["ledger/opened"] == len(run.prompts.taken)


def check_sample(sample: Sample) -> None:
    """Check that a sample is a prefix of the uninterrupted response."""
    versions = sample.policy_versions
    count = len(sample.token_ids)
    assert len(sample.behaviour_logprobs) == len(versions) == sample.num_tokens == count
    assert sample.token_ids.tolist() == [token(sample.id, p) for p in range(count)]
    expected = [logprob(sample.id, p, v) for p, v in enumerate(versions)]
    assert sample.behaviour_logprobs.tolist() == expected
    assert list(versions) == sorted(versions)


def check_trainable(scored: ScoredGroup, setup: Setup) -> None:
    """Check that a group is complete, ended as planned, and has the rewards of its samples."""
    group: Group = scored.group
    assert [sample.index for sample in group.samples] == list(range(setup.group_size))
    for sample in group.samples:
        assert sample.prompt is group.prompt
        natural = setup.length_of(sample.id)
        assert sample.num_tokens == min(natural, setup.budget)
        assert sample.finish_reason == ("stop" if natural <= setup.budget else "length")
    assert scored.rewards == tuple(reward(sample.id) for sample in group.samples)
    assert scored.parts == tuple((("a", value), ("b", 0.0)) for value in scored.rewards)


def check_drained(run: Run) -> None:
    """Check that every prompt was trained exactly once, with the right samples."""
    for scored in run.trained:
        check_trainable(scored, run.setup)
        for sample in scored.group.samples:
            check_sample(sample)
    assert len(run.trained) == len(run.prompts.taken)


LENGTH_DISTRIBUTIONS = st.one_of(
    st.integers(1, 30).map(constant),
    st.builds(lognormal, st.floats(2, 12), st.floats(0.2, 1.5)),
    st.integers(2, 12).map(extreme),
)

SETUPS = st.builds(
    Setup,
    num_groups=st.integers(1, 4),
    group_size=st.integers(1, 4),
    alpha=st.floats(1, 4),
    refill=st.booleans(),
    num_engines=st.integers(1, 3),
    tick_steps=st.integers(1, 16),
    budget=st.integers(1, 40),
    length_of=LENGTH_DISTRIBUTIONS,
    delay=st.integers(0, 6),
    reject_every=st.sampled_from([0, 2, 3]),
    failing=st.sampled_from([frozenset(), frozenset({0, 4, 5}), frozenset(range(0, 99, 3))]),
    by_group=st.booleans(),
    max_staleness=st.integers(1, 6),
    finish_stale=st.booleans(),
    deterministic=st.booleans(),
    keeps=st.booleans(),
    computes_on=st.booleans(),
)
