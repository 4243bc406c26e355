"""Staleness is counted when tokens are trained, by age and by length, and separately
from mismatch.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_runs import SETUPS, Run, Setup, lognormal

from april_rl.training.batch.packing import Batch, MicroBatch
from april_rl.training.batch.staleness import staleness_by_length
from april_rl.types import Sample, ScoredGroup

quick = settings(max_examples=60, deadline=None)
PARKING = Setup(num_groups=4, group_size=4, alpha=2.5, budget=80, length_of=lognormal(12, 0.8))


def bucket_of(length: int, budget: int) -> str:
    """Return the smallest of the four shares of the budget that the response does not exceed."""
    for share, name in ((8, "to_1_8"), (4, "to_1_4"), (2, "to_1_2")):
        if share * length <= budget:
            return name
    return "to_1"


def samples_of(groups: tuple[ScoredGroup, ...]) -> list[Sample]:
    return [sample for scored in groups for sample in scored.group.samples]


def rows_of(batch: Batch) -> list[MicroBatch]:
    return [row for rank in batch.minibatches[0] for row in rank]


@quick
@given(SETUPS, st.integers(1, 5))
@example(PARKING, 6)
def test_staleness_by_length_counts_every_trained_token_in_the_bucket_of_its_response(setup, steps):
    """Compared with a count token by token. Fails when a bucket depends on a part of a response
    instead of the whole, ages belong to the samples' first tokens, a bound belongs to the bucket
    above it, or a bucket without tokens has a key.
    """
    run = Run(setup)
    for version in range(steps):
        groups = run.step().groups
        ages: defaultdict[str, list[int]] = defaultdict(list)
        for sample in samples_of(groups):
            name = bucket_of(len(sample.token_ids), setup.budget)
            ages[name] += [version - sampled for sampled in sample.policy_versions]
        expected = {}
        for name, of_bucket in ages.items():
            stale = sum(age > 0 for age in of_bucket)
            expected[f"staleness/off_policy_token_frac_len_{name}"] = stale / len(of_bucket)
            expected[f"staleness/age_mean_len_{name}"] = sum(of_bucket) / len(of_bucket)
        read = run.pack(groups).metrics.read()
        by_length = {key: value for key, value in read.items() if "_len_" in key}
        assert by_length == pytest.approx(expected)


def test_responses_longer_than_a_lowered_budget_are_in_the_last_bucket():
    """Fails when they get their own bucket, whose tokens no metric shows."""
    ages, lengths = np.array([0] * 3 + [2] * 30, np.int32), np.array([3, 30])
    read = staleness_by_length(ages, lengths, max_response_tokens=24).read()
    assert read["staleness/off_policy_token_frac_len_to_1_8"] == 0.0
    assert read["staleness/age_mean_len_to_1"] == 2.0
    assert len(read) == 4


@quick
@given(SETUPS, st.integers(1, 5))
@example(replace(PARKING, keeps=True), 6)
@example(replace(PARKING, keeps=False), 6)
def test_only_tokens_of_this_version_on_a_cache_of_this_version_are_compared(setup, steps):
    """Mismatch is separate from staleness: a stale token is never compared, nor is a fresh one of a
    kept sample; a fresh one after another prefill is compared. Fails when only the version of a
    token decides, or the cache version of the sample's first part does.
    """
    run = Run(setup)
    for version in range(steps):
        groups = run.step().groups
        compared = [
            c.policy_version == version and not c.is_kept
            for sample in samples_of(groups)
            for c in sample.completions
            for _ in c.token_ids
        ]
        for row in rows_of(run.pack(groups)):
            assert not row.is_comparable[~row.response_mask].any()
            assert not row.is_comparable[row.ages > 0].any()
        batch = run.pack(groups)
        assert sum(int(row.is_comparable.sum()) for row in rows_of(batch)) == sum(compared)


@quick
@given(SETUPS, st.integers(1, 5))
@example(replace(PARKING, keeps=True), 6)
@example(replace(PARKING, keeps=False), 6)
def test_fresh_tokens_on_an_old_cache_are_counted_separately_from_off_policy_tokens(setup, steps):
    """Fails when off-policy tokens are included, or fresh tokens on a fresh cache."""
    run = Run(setup)
    for version in range(steps):
        groups = run.step().groups
        completions = [c for sample in samples_of(groups) for c in sample.completions]
        tokens = sum(len(c.token_ids) for c in completions)
        on_old_cache = sum(
            len(c.token_ids)
            for c in completions
            if c.policy_version == version and c.context_version < version
        )
        read = run.pack(groups).metrics.read()
        assert read["staleness/old_cache_token_frac"] == pytest.approx(on_old_cache / tokens)


def test_every_trained_token_is_off_policy_or_on_an_old_cache_or_compared():
    """With kept caches, when there are some of each kind. Fails when a share is always zero."""
    run = Run(replace(PARKING, keeps=True))
    shares = []
    for _ in range(6):
        batch = run.pack(run.step().groups)
        read = batch.metrics.read()
        shares.append(read["staleness/old_cache_token_frac"])
        compared = sum(int(row.is_comparable.sum()) for row in rows_of(batch))
        assert shares[-1] + read["staleness/off_policy_token_frac"] == pytest.approx(
            1 - compared / batch.metrics.read()["throughput/trained_tokens"]
        )
    assert shares[0] == 0 < max(shares)
