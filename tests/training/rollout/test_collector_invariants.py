"""Invariants of every run, for arbitrary lengths, engines, rewards and settings."""

from collections import Counter
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_runs import SETUPS, Run, Setup, check_counts, check_sample, check_trainable, lognormal

STEPS = st.integers(1, 5)
TIGHT = Setup(  # the tail lasts longer than the staleness cap allows
    num_groups=4, group_size=4, alpha=2.0, max_staleness=2, budget=160, length_of=lognormal(12, 0.8)
)
quick = settings(max_examples=60, deadline=None)


@quick
@given(SETUPS, STEPS)
def test_resumed_responses_equal_uninterrupted_ones_with_logprobs_and_versions(setup, steps):
    """Invariants 1 and 2. Fails when a resumed request leaves out the response so far or asks for
    the whole token budget again (the fake engine refuses both), or every token gets the version of
    the sample's last part.
    """
    run = Run(setup)
    run.steps(steps)
    trained = [sample for scored in run.trained for sample in scored.group.samples]
    assert trained
    for sample in [*trained, *run.alive]:
        check_sample(sample)


@quick
@given(SETUPS, STEPS)
def test_no_token_is_generated_twice_or_thrown_away(setup, steps):
    """Fails when only finished completions of the abort are appended, or none, or parked samples
    restart from their prompt.
    """
    run = Run(setup)
    for _ in range(steps):
        run.step()
        assert run.fakes.generated == run.num_tokens_held()


@quick
@given(SETUPS, STEPS)
def test_the_ledger_agrees_with_independent_counts_at_every_step(setup, steps):
    """Invariant 3. Fails when a rejected or dropped group is not recorded, or ready groups count as
    parked.
    """
    run = Run(setup)
    for _ in range(steps):
        run.step()
        check_counts(run)


@quick
@given(SETUPS, STEPS)
def test_only_complete_scored_groups_are_trained_and_only_once(setup, steps):
    """Invariant 4. Fails when a group is ready before its last score, rewards are stored in the
    order of their arrival, or ready groups stay in the buffer after their step.
    """
    run = Run(setup)
    run.steps(steps)
    for scored in run.trained:
        check_trainable(scored, setup)
    trained = Counter(scored.group.prompt.id for scored in run.trained)
    assert set(trained.values()) <= {1}
    rejected = {scored.group.prompt.id for scored in run.rejected}
    assert not trained.keys() & (rejected | setup.failing)


@quick
@given(SETUPS, STEPS)
def test_every_step_has_its_groups_and_leaves_none_that_becomes_too_old(setup, steps):
    """Fails when the random draw includes groups that are due."""
    run = Run(setup)
    for version in range(steps):
        groups = run.step().groups
        assert len(groups) == setup.num_groups
        ages = [(scored.group.oldest_version, scored.group.prompt.id) for scored in groups]
        assert ages == sorted(ages)
        if not setup.finish_stale:
            continue
        buffer = run.buffer
        left = buffer.open_versions(policy_version=version) + buffer.ready_versions()
        for steps_left in range(setup.max_staleness + 1):
            latest = version - setup.max_staleness + steps_left
            due = sum(count for oldest, count in left.items() if oldest <= latest)
            assert due <= steps_left * setup.num_groups


@quick
@given(SETUPS, STEPS)
def test_at_most_c_requests_are_in_flight(setup, steps):
    """Nor are there more than slots(e) on one engine, which the fake engine checks. Fails when
    every engine gets C slots, or the share of each is rounded up.
    """
    run = Run(setup)
    run.steps(steps)
    assert run.fakes.most_running <= setup.num_slots
    assert run.fakes.most_under_way <= 2


@quick
@given(SETUPS, STEPS)
@example(replace(TIGHT, finish_stale=False), 10)
def test_tokens_beyond_the_staleness_cap_have_no_loss_weight(setup, steps):
    """Invariant 7, with finish and mask. Fails when the packer's cap is one too high."""
    run = Run(setup)
    for _ in range(steps):
        batch = run.pack(run.step().groups)
        for row in (row for rank in batch.minibatches[0] for row in rank):
            assert not row.loss_weights[row.ages > setup.max_staleness].any()


@quick
@given(SETUPS, st.integers(2, 10))
@example(TIGHT, 10)
@example(replace(TIGHT, alpha=1.5, max_staleness=4), 14)
def test_a_step_waits_so_that_no_token_is_masked(setup, steps):
    """Invariant 7, with finish, for every alpha. Fails when the step waits only for groups at the
    cap, or more groups are opened than can be trained within it.
    """
    run = Run(replace(setup, finish_stale=True))
    for _ in range(steps):
        batch = run.pack(run.step().groups)
        assert batch.metrics.read()["staleness/masked_tokens"] == 0


@quick
@given(SETUPS, STEPS)
def test_the_same_seed_gives_the_same_groups_token_for_token(setup, steps):
    """Invariant 8. Fails when anything depends on a clock, on the order of a set, or on an earlier
    collector.
    """
    first, second = Run(setup), Run(setup)
    groups = first.steps(steps)
    Run(replace(setup, alpha=setup.alpha + 1, num_engines=setup.num_engines + 1)).step()
    assert groups == second.steps(steps)
    assert first.alive == second.alive


@quick
@given(SETUPS, STEPS)
def test_a_run_that_opens_no_more_prompts_trains_everything_and_ends(setup, steps):
    """Fails when the loop continues with nothing to do (the fake engine counts), or ends while
    scores are missing.
    """
    run = Run(setup)
    run.steps(steps)
    opened = len(run.prompts.taken)
    run.drain()
    assert len(run.prompts.taken) == opened
    assert run.alive == []
    assert len(run.trained) + len(run.rejected) + run.num_dropped() == opened


@quick
@given(SETUPS, STEPS)
def test_parked_samples_are_submitted_before_new_prompts_the_oldest_first(setup, steps):
    """Fails when new prompts are opened first, or parked groups are resumed newest first. No sample
    here has an environment, because samples with a reply go first.
    """
    run = Run(replace(setup, turns=0))
    run.steps(steps)
    parked = [sample.id for sample in run.alive if not sample.is_finished]
    before = [len(engine.requests) for engine in run.fakes.each]
    run.step()
    for engine, skip in zip(run.fakes.each, before, strict=True):
        submitted = [request.sample_id for request in engine.requests[skip:]]
        assert submitted == sorted(submitted)
    later = {
        request.sample_id
        for engine, skip in zip(run.fakes.each, before, strict=True)
        for request in engine.requests[skip:]
    }
    if later - set(parked):
        assert set(parked) <= later


def test_the_default_settings_park_and_resume_samples():
    """Otherwise the tests above could pass without testing anything."""
    run = Run(Setup(refill=True, alpha=3))
    resumed = [sum(each.start > 0 for each in run.step().record.returned) for _ in range(4)]
    assert sum(resumed) > 0
    assert any(len(sample.completions) > 1 for s in run.trained for sample in s.group.samples)
