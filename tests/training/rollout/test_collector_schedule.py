"""The order in which the collector works, and that it includes the plain synchronous loop."""

from array import array
from collections import Counter
from dataclasses import replace

import pytest
from fake_engine import experts, logprob, token
from fake_outside import FakePrompts, reward
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_runs import LENGTH_DISTRIBUTIONS, Run, Setup, constant, extreme, lognormal

from april_rl.training.rollout.requests import request_seed
from april_rl.training.rollout.stop_rule import must_wait
from april_rl.types import Completion, Group, Sample, SampleId, ScoredGroup


def plain_step(setup: Setup, prompts: FakePrompts, version: int) -> list[ScoredGroup]:
    """Return N prompts with G whole responses each, as the synchronous loop does, without an
    engine.
    """
    groups = []
    for _ in range(setup.num_groups):
        prompt = prompts.take()
        samples = []
        for index in range(setup.group_size):
            sample_id = SampleId(prompt.id, index)
            natural = setup.length_of(sample_id)
            length = range(min(natural, setup.budget))
            completion = Completion(
                sample_id=sample_id,
                start=0,
                policy_version=version,
                context_version=version,
                token_ids=array("i", (token(sample_id, p) for p in length)),
                logprobs=array("d", (logprob(sample_id, p, version) for p in length)),
                finish_reason="stop" if natural <= setup.budget else "length",
                experts=experts(sample_id, range(len(prompt.token_ids) + len(length) - 1), version),
            )
            samples.append(Sample(prompt=prompt, index=index).with_span(completion))
        rewards = tuple(reward(sample.id) for sample in samples)
        parts = tuple((("a", value), ("b", 0.0)) for value in rewards)
        group = Group(prompt=prompt, samples=tuple(samples))
        groups.append(ScoredGroup(group=group, rewards=rewards, parts=parts))
    return groups


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Setup,
        num_groups=st.integers(1, 4),
        group_size=st.integers(1, 4),
        alpha=st.just(1.0),
        refill=st.just(False),
        num_engines=st.integers(1, 3),
        tick_steps=st.integers(1, 16),
        length_of=LENGTH_DISTRIBUTIONS,
        delay=st.integers(0, 6),
        max_staleness=st.integers(0, 3),
        seed=st.integers(0, 9),
    ),
    st.integers(1, 4),
)
def test_alpha_one_without_refill_is_the_plain_synchronous_loop(setup, steps):
    """Invariant 5: the same groups with the same seeds. Fails when the collector starts anything
    early, or returns groups in the order of completion.
    """
    run, prompts = Run(setup), FakePrompts()
    for version in range(steps):
        assert list(run.step().groups) == plain_step(setup, prompts, version)
        assert run.alive == []
    assert run.prompts.taken == prompts.taken
    for request in (request for engine in run.fakes.each for request in engine.requests):
        assert request.seed == request_seed(setup.seed, request.sample_id, 0)


def test_request_seeds_depend_only_on_run_seed_sample_and_number_of_completions():
    """Fails when the number of completions, the index or the run's seed is left out."""
    seeds = {
        request_seed(run_seed, SampleId(prompt_id, index), completions)
        for run_seed in range(3)
        for prompt_id in (0, 1, -1)
        for index in range(3)
        for completions in range(3)
    }
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)
    run = Run(Setup(length_of=extreme(3), alpha=2.0))
    run.steps(4)
    asked = {(r.sample_id, r.start): r.seed for r in run.fakes.each[0].requests}
    samples = [sample for scored in run.trained for sample in scored.group.samples]
    assert any(len(sample.completions) > 1 for sample in samples)
    for sample in samples:
        for number, completion in enumerate(sample.completions):
            assert asked[sample.id, completion.start] == request_seed(0, sample.id, number)


def test_extra_ready_groups_come_first_in_the_next_step():
    """Fails when ready groups are dropped at the end of a step, or other groups are generated
    instead.
    """
    run = Run(Setup(num_groups=2, alpha=3.0, length_of=constant(4), tick_steps=4))
    first = run.step()
    surplus = [scored.group.prompt.id for scored in run.buffer.ready_groups()]
    assert len(surplus) >= 2
    generated = run.fakes.generated
    second = run.step()
    assert {scored.group.prompt.id for scored in second.groups} <= set(surplus)
    assert run.fakes.generated == generated
    assert first.groups[0].group.prompt.id == 0


@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_kept_sample_returns_to_the_engine_with_its_kv_cache(num_engines):
    """Fails when a step forgets which engine has a parked sample, or counts kept samples as
    prefilled again.
    """
    length_of = lognormal(30, 0.8)
    setup = Setup(
        num_groups=6, group_size=4, alpha=2.0, length_of=length_of, budget=200, keeps=True
    )
    run = Run(replace(setup, num_engines=num_engines))
    records = [run.step().record for _ in range(8)]
    returned = [each for record in records for each in record.returned if each.start]
    resumed, kept = len(returned), sum(each.is_kept for each in returned)
    assert kept > 50
    assert kept >= 0.9 * resumed
    if num_engines == 1:
        assert kept == resumed
        assert sum(record.reprefill_tokens for record in records) == 0
    again = Run(replace(setup, keeps=False, num_engines=num_engines))
    assert sum(again.step().record.reprefill_tokens for _ in range(8)) > 1000


def test_refill_keeps_every_slot_busy():
    """Fails when a slot waits for the controller, or slots are refilled only by whole groups."""
    length_of = lognormal(60, 0.5)
    run = Run(
        Setup(
            **{"num_groups": 8, "group_size": 4, "alpha": 2.0, "max_staleness": 8},
            **{
                "length_of": length_of,
                "budget": 400,
                "tick_steps": 1,
            },  # the last tick does not count
        )
    )
    records = [run.step().record for _ in range(6)]
    busy = [record.in_flight_mean / record.num_slots for record in records if record.ticks]
    assert min(busy) > 0.9


def test_a_step_that_only_waits_for_stale_groups_opens_no_prompts():
    """Fails when prompts are opened while enough groups are ready: they would only become stale."""
    setup = Setup(
        num_groups=2,
        group_size=1,
        alpha=2.0,
        tick_steps=2,
        max_staleness=4,
        budget=400,
        length_of=lambda s: 400 if s.prompt_id == 0 else 6,
    )
    run = Run(setup)
    run.steps(4)
    record = run.step().record
    assert run.trained[-2].group.prompt.id == 0
    assert sum(tick.engine_steps for _, tick in record.ticks) > 200
    assert run.buffer.num_live <= 5


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_engine_computes_a_tick_while_the_next_is_prepared(num_engines):
    """Fails when an engine gets its next tick only after the last one was processed."""
    run = Run(Setup(num_engines=num_engines))
    run.step()
    assert run.fakes.most_under_way == 2


@pytest.mark.parametrize(
    ("open_versions", "ready_versions", "expected"),
    [
        ([], [3, 3], False),
        ([5, 5, 5, 5], [3, 5], False),  # no group is near the cap
        ([2], [3, 3], True),  # one group must be trained now and can be
        ([2], [2, 2], False),  # the same group, but the step is full of such groups
        ([3, 3], [4, 4], False),  # two groups can still be trained in the next step
        ([3, 3, 3], [4, 4], True),  # three cannot
        ([3, 3, 3], [3, 3], False),  # waiting would not help
        (
            [5] * 6,
            [5],
            False,
        ),  # the step ends with too few groups: three more can train six
        ([5] * 7, [5], True),  # three more steps cannot train seven
    ],
)
def test_a_step_waits_when_later_steps_could_not_train_the_rest_in_time(
    open_versions, ready_versions, expected
):
    waits = must_wait(
        open_versions=Counter(open_versions),
        ready_versions=Counter(ready_versions),
        num_groups=2,
        oldest_allowed=2,
        policy_version=5,
    )
    assert waits is expected


def test_scores_can_be_settled_before_the_first_step_and_between_steps():
    """An evaluation does this. Fails when a collector needs a first step before it can settle
    scores.
    """
    run = Run(Setup(delay=6, alpha=2.0))
    run.collector.settle_scores()
    for _ in range(4):
        run.step()
        run.collector.settle_scores()
        assert not run.buffer.has_missing_replies
