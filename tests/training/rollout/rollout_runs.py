"""Runs of the real collector on fakes, with independent bookkeeping of every prompt."""

import math
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from fake_engine import SAID, FakeEngines, LengthDistribution, experts, logprob, token
from fake_outside import FakePrompts, FakeScorer, num_turns, reward
from hypothesis import strategies as st

from april_rl.training.algorithm.age import age_weights, decay
from april_rl.training.algorithm.aggregation import token_mean
from april_rl.training.batch.packing import Batch, Packer
from april_rl.training.rollout.collector import Collection, Collector
from april_rl.training.rollout.dispatch import RequestRules
from april_rl.training.rollout.ports import Engines
from april_rl.training.rollout.record import GroupState
from april_rl.training.rollout.step import StepRules
from april_rl.training.rollout.stop_rule import Filter
from april_rl.types import Completion, Group, Observation, Sample, SampleId, ScoredGroup


def constant(length: int) -> LengthDistribution:
    return lambda _: length


def lognormal(median: float, sigma: float) -> LengthDistribution:
    """Return a long-tailed distribution in which a length is a function of the sample."""

    def length_of(sample_id: SampleId) -> int:
        z = math.sin(sample_id.prompt_id * 12.9898 + sample_id.index * 78.233) * 43758.5453
        u = min(max(z - math.floor(z), 0.01), 0.99)
        return max(1, round(median * math.exp(sigma * math.log(u / (1 - u)))))

    return length_of


def extreme(every: int) -> LengthDistribution:
    """Return a distribution of one-token responses, with an endless one for one sample
    in `every`.
    """
    return lambda s: 10**9 if (s.prompt_id + 3 * s.index) % every == 0 else 1


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a run; the defaults are a plain run with partial rollouts."""

    num_groups: int = 3
    group_size: int = 2
    alpha: float = 1.5
    refill: bool = True
    num_engines: int = 1
    tick_steps: int = 4
    budget: int = 40
    length_of: LengthDistribution = field(default_factory=lambda: lognormal(8, 0.6))
    delay: int = 0
    reject_every: int = 0  # prompts whose id is a multiple of this are rejected; 0: none
    failing: frozenset[int] = frozenset()
    stuck: frozenset[int] = frozenset()
    by_group: bool = False  # whether the scorer wants whole groups
    max_staleness: int = 5
    finish_stale: bool = True
    max_rejected_groups: int = 1000
    cause: str = Filter().cause  # of a rejected group, for messages
    deterministic: bool = False
    seed: int = 0
    keeps: bool = False  # whether engines keep the state of aborted samples
    computes_on: bool = True  # whether the engines continue to compute before they abort
    turns: int = 0  # most turns of a sample with an environment; 0: samples have none
    broken: frozenset[int] = frozenset()  # prompts whose environment fails

    @property
    def num_slots(self) -> int:
        return round(self.alpha * self.num_groups * self.group_size)


class Run:
    """A collector on fakes, and what became of every prompt."""

    def __init__(
        self,
        setup: Setup,
        engines: Engines | None = None,
        *,
        prompts: FakePrompts | None = None,
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
            turns=setup.turns,
            broken=setup.broken,
            budget=setup.budget,
        )
        self.prompts = prompts or FakePrompts(turns=setup.turns)
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
                group_filter=Filter(keep=self._keep, cause=setup.cause),
                abort_timeout_s=7.0,
                tick_timeout_s=9.0,
                deterministic=setup.deterministic,
                requests=RequestRules(
                    tick_steps=setup.tick_steps, max_response_tokens=setup.budget, seed=setup.seed
                ),
            ),
            clock=self.fakes.clock,
            over_sampling_factor=setup.alpha,
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
        return [self.step().groups for _ in range(number)]

    def drain(self) -> None:
        """Run steps that open no prompts, until nothing is left to train."""
        while self.step(may_open=False).groups:
            pass

    def pack(self, groups: tuple[ScoredGroup, ...]) -> Batch:
        """Pack the groups of the last step for two ranks."""
        longest = 3 + self.setup.budget + 2 + 3 * self.setup.turns
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

    # The test's own records.

    @property
    def alive(self) -> list[Sample]:
        open_ = [sample for group in self.buffer.open_groups() for sample in group.samples]
        return open_ + [s for scored in self.buffer.ready_groups() for s in scored.group.samples]

    def num_dropped(self) -> int:
        """Return the number of opened prompts that are in no other state; only prompts whose reward
        fails may be among them.
        """
        gone = set(self.prompts.taken) - {sample.prompt.id for sample in self.alive}
        gone -= {scored.group.prompt.id for scored in self.trained + self.rejected}
        assert gone <= self.setup.failing | self.setup.broken, f"prompts {gone} vanished"
        return len(gone)

    def num_tokens_held(self) -> int:
        """Return the response tokens of all samples ever opened."""
        groups = [scored.group for scored in self.trained + self.rejected]
        held = self.alive + [sample for group in groups for sample in group.samples]
        known = {sample.prompt.id for sample in held}
        dropped = sum(
            num_sampled(SampleId(prompt_id, index), self.setup)
            for prompt_id in set(self.prompts.taken) - known
            for index in range(self.setup.group_size)
        )
        return dropped + sum(sample.num_tokens for sample in held)


def num_sampled(sample_id: SampleId, setup: Setup) -> int:
    turns = 1
    if setup.turns and sample_id.prompt_id % 2 == 0:
        is_broken = sample_id.prompt_id in setup.broken and sample_id.index == 0
        turns = 1 if is_broken else num_turns(sample_id, setup.turns)
    return min(turns * setup.length_of(sample_id), setup.budget)


def check_counts(run: Run) -> None:
    """Compare the buffer's counts between two steps with the test's own records."""
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
    response = sample.sequence[len(sample.prompt.token_ids) :]
    places = [place for place, each in enumerate(response) if each != SAID]
    assert len(response) == sample.end
    assert sample.token_ids.tolist() == [token(sample.id, place) for place in places]
    expected = [logprob(sample.id, p, v) for p, v in zip(places, versions, strict=True)]
    assert sample.behaviour_logprobs.tolist() == expected
    assert list(versions) == sorted(versions)
    check_experts(sample)


def check_experts(sample: Sample) -> None:
    """Check that every token, except those after the last one that was read, has the experts of the
    version that sampled the next token.
    """
    end = known = 0
    for span in (sample.prompt, *sample.spans):
        end += len(span.token_ids)
        if isinstance(span, Completion) and span.token_ids:
            expected = experts(sample.id, range(known, end - 1), span.policy_version)
            assert span.experts == expected, sample.id
            known = end - 1


def check_trainable(scored: ScoredGroup, setup: Setup) -> None:
    """Check that a group is complete, ended as planned, and has the rewards of its samples."""
    group: Group = scored.group
    assert [sample.index for sample in group.samples] == list(range(setup.group_size))
    for sample in group.samples:
        assert sample.prompt is group.prompt
        assert sample.num_tokens == num_sampled(sample.id, setup)
        natural = num_sampled(sample.id, replace(setup, budget=10**12))
        is_whole = natural <= setup.budget or setup.budget % setup.length_of(sample.id) == 0
        assert sample.finish_reason == ("stop" if is_whole else "length")
        turns = sum(completion.finish_reason is not None for completion in sample.completions)
        said = [span for span in sample.spans if isinstance(span, Observation)]
        assert sum(each.reward for each in said) == (turns if sample.prompt.has_environment else 0)
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
    turns=st.integers(0, 4),
    broken=st.sampled_from([frozenset(), frozenset({0, 8, 10})]),
)
