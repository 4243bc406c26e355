"""Packed rows: every response token once, at the position that predicts it, and weights that sum
to one.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from fake_engine import logprob, token
from hypothesis import given, settings
from hypothesis import strategies as st
from light_samples import following, make_packer

from april_rl.training.algorithm.aggregation import (
    Aggregate,
    constant_length,
    sequence_mean,
    token_mean,
)
from april_rl.training.batch.packing import Batch, MicroBatch
from april_rl.training.batch.plan import plan_micro_batches
from april_rl.types import FinishReason, Group, Prompt, Sample, SampleId, ScoredGroup

VERSION = 7  # the step that trains
BUDGET = 64


@dataclass(frozen=True)
class Plan:
    """Parts of each sample of each group as (version, tokens), and the packer's settings."""

    parts: list[list[list[tuple[int, int]]]]
    num_ranks: int
    num_minibatches: int
    max_staleness: int
    age_decay: float


def make_sample(
    prompt: Prompt, index: int, parts: list[tuple[int, int]], *, reason: FinishReason = "stop"
) -> Sample:
    sample = Sample(prompt=prompt, index=index)
    for i, (version, length) in enumerate(parts):
        positions = range(sample.num_tokens, sample.num_tokens + length)
        part = following(
            sample,
            array("i", (token(sample.id, p) for p in positions)),
            version=version,
            logprobs=array("d", (logprob(sample.id, p, version) for p in positions)),
            finish_reason=reason if i == len(parts) - 1 else None,
        )
        sample = sample.with_span(part)
    return sample


def groups_of(plan: Plan) -> list[ScoredGroup]:
    found = []
    for prompt_id, samples in enumerate(plan.parts):
        ids = (10_000 + prompt_id,) * (1 + prompt_id % 4)
        prompt = Prompt(id=prompt_id, token_ids=ids, text="", answer="", source="")
        members = tuple(make_sample(prompt, i, parts) for i, parts in enumerate(samples))
        rewards = tuple(float(i) for i in range(len(samples)))
        found.append(ScoredGroup(group=Group(prompt=prompt, samples=members), rewards=rewards))
    return found


def advantage(sample_id: SampleId) -> float:
    return sample_id.prompt_id + sample_id.index / 8 + 0.5


def pack(
    plan: Plan, *, aggregation: Aggregate = token_mean, probes: Sequence[Sample] = ()
) -> tuple[Batch, list[ScoredGroup]]:
    groups = groups_of(plan)
    packer = make_packer(
        num_ranks=plan.num_ranks,
        num_minibatches=plan.num_minibatches,
        max_staleness=plan.max_staleness,
        age_decay=plan.age_decay,
        aggregation=aggregation,
    )
    advantages = [
        np.asarray([advantage(sample.id) for sample in scored.group.samples]) for scored in groups
    ]
    of_teacher = {
        sample.id: 2 * np.asarray(sample.behaviour_logprobs, np.float32)
        for scored in groups
        for sample in scored.group.samples
    }
    batch = packer.pack(
        groups, advantages, policy_version=VERSION, probes=probes, teacher_logprobs=of_teacher
    )
    return batch, groups


def loss_weights_of(row: MicroBatch) -> dict[tuple[int, ...], list[float]]:
    """Return the loss weights of each response of a row, in the order of its tokens."""
    ends = np.cumsum(row.response_lengths)[:-1]
    tokens = np.split(row.labels[row.response_mask], ends)
    weights = np.split(row.loss_weights[row.response_mask], ends)
    return {tuple(t.tolist()): w.tolist() for t, w in zip(tokens, weights, strict=True)}


def rows_of(batch: Batch) -> list[MicroBatch]:
    return [row for minibatch in batch.minibatches for rank in minibatch for row in rank]


PARTS = st.lists(st.tuples(st.integers(0, VERSION), st.integers(1, 15)), min_size=1, max_size=4)
PLANS = st.builds(
    Plan,
    parts=st.lists(st.lists(PARTS.map(sorted), min_size=1, max_size=4), min_size=1, max_size=5),
    num_ranks=st.integers(1, 3),
    num_minibatches=st.integers(1, 3),
    max_staleness=st.integers(0, VERSION),
    age_decay=st.sampled_from([1.0, 0.5, 0.01]),
)
quick = settings(max_examples=60, deadline=None)


@quick
@given(PLANS)
def test_every_sequence_is_in_one_row_with_each_token_labelled_where_it_is_predicted(plan):
    """Fails when labels, log-probabilities, ages or advantages are shifted by one, or a row starts
    where the last sequence's response ended.
    """
    batch, groups = pack(plan)
    expected = {(*s.prompt.token_ids, *s.token_ids): s for g in groups for s in g.group.samples}
    seen = []
    for row in rows_of(batch):
        start = 0
        for length in row.lengths:
            part = slice(start, start + length)
            start += length
            if not row.response_mask[part].any():
                continue
            sample = expected[tuple(row.token_ids[part].tolist())]
            seen.append(sample.id)
            first = len(sample.prompt.token_ids) - 1
            where = row.response_mask[part]
            assert where.tolist() == [False] * first + [True] * sample.num_tokens + [False]
            assert row.position_ids[part].tolist() == list(range(length))
            assert row.labels[part][where].tolist() == list(sample.token_ids)
            assert np.allclose(row.behaviour_logprobs[part][where], sample.behaviour_logprobs)
            assert row.teacher_logprobs is not None
            assert np.allclose(row.teacher_logprobs[part], 2 * row.behaviour_logprobs[part])
            ages = [VERSION - version for version in sample.policy_versions]
            assert row.ages[part][where].tolist() == ages
            assert set(row.credits[part][where].tolist()) == {advantage(sample.id)}
            for values in (row.labels, row.behaviour_logprobs, row.ages, row.loss_weights):
                assert not values[part][~where].any()
    assert sorted(seen) == sorted(sample.id for sample in expected.values())


AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_length": partial(constant_length, max_response_tokens=BUDGET),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_loss_weights_are_aggregated_over_all_ranks_and_without_probes(name, num_ranks):
    """Two minibatches of two responses each. One sample is trained only in part, because its first
    tokens are too old. No token is fresh, so there is a probe as well. Fails when a rank or a row
    is aggregated on its own, when probes count as responses, or when weights reach another sample.
    """
    old, young = VERSION - 2, VERSION - 1
    parts = [[[(young, 4)], [(young, 12)]], [[(old, 2), (young, 2)], [(young, 6)]]]
    plan = Plan(parts, num_ranks, num_minibatches=2, max_staleness=1, age_decay=1.0)
    prompt = Prompt(id=99, token_ids=(10_099,), text="", answer="", source="")
    probe = make_sample(prompt, 0, [(VERSION, 9)])
    batch, groups = pack(plan, aggregation=AGGREGATIONS[name], probes=[probe])
    expected = {
        "token_mean": [[1 / 16] * 4, [1 / 16] * 12, [0, 0, 1 / 8, 1 / 8], [1 / 8] * 6],
        "sequence_mean": [[1 / 8] * 4, [1 / 24] * 12, [0, 0, 1 / 4, 1 / 4], [1 / 12] * 6],
        "constant_length": [[1 / 128] * 4, [1 / 128] * 12, [0, 0] + [1 / 128] * 2, [1 / 128] * 6],
    }[name]
    found = dict(item for row in rows_of(batch) for item in loss_weights_of(row).items())
    samples = [sample for scored in groups for sample in scored.group.samples]
    assert [found[tuple(s.token_ids)] for s in samples] == [pytest.approx(w) for w in expected]
    assert found[tuple(probe.token_ids)] == [0.0] * 9


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_masked_truncated_responses_count_neither_in_loss_nor_denominator(name, mask_truncated):
    """Three responses of 4, 12 and 8 tokens are packed with advantages; the second one was
    truncated. Planted bug: its weight is removed after the aggregation, so that the denominator
    still counts it.
    """
    prompt = Prompt(id=0, token_ids=(10_000,), text="", answer="", source="")
    cut = (("stop", 4), ("length", 12), ("stop", 8))
    samples = tuple(
        make_sample(prompt, i, [(VERSION, length)], reason=reason)
        for i, (reason, length) in enumerate(cut)
    )
    groups = [ScoredGroup(group=Group(prompt=prompt, samples=samples), rewards=(0.0, 0.0, 1.0))]
    packer = make_packer(aggregation=AGGREGATIONS[name], mask_truncated=mask_truncated)
    batch = packer.pack(groups, [[1.0, 2.0, 3.0]], policy_version=VERSION)
    masked, plain = {
        "token_mean": ([1 / 12, 0, 1 / 12], [1 / 24] * 3),
        "sequence_mean": ([1 / 8, 0, 1 / 16], [1 / 12, 1 / 36, 1 / 24]),
        "constant_length": ([1 / 128, 0, 1 / 128], [1 / 192] * 3),
    }[name]
    found = dict(item for row in rows_of(batch) for item in loss_weights_of(row).items())
    for sample, weight in zip(samples, masked if mask_truncated else plain, strict=True):
        expected = [weight] * sample.num_tokens
        assert found[tuple(sample.token_ids)] == pytest.approx(expected)
    assert {1.0, 2.0, 3.0} <= set(np.concatenate([r.credits for r in rows_of(batch)]).tolist())


@quick
@given(PLANS)
def test_weights_fall_with_age_and_are_zero_beyond_the_cap(plan):
    """Invariant 7. Fails when the cap is off by one, or the decay starts at another age."""
    batch, _ = pack(plan)
    for minibatch in batch.minibatches:
        rows = [row for rank in minibatch for row in rank]
        ages = np.concatenate([row.ages[row.response_mask] for row in rows])
        weights = np.concatenate([row.loss_weights[row.response_mask] for row in rows])
        expected = np.where(ages <= plan.max_staleness, plan.age_decay**ages, 0.0)
        total = expected.sum()
        assert np.allclose(weights, expected / total if total else 0.0, rtol=1e-4, atol=0)


@quick
@given(PLANS)
def test_all_ranks_make_the_same_number_of_passes_within_the_budget(plan):
    """Fails when a rank without work gets no dummy row (FSDP would wait forever), or a row is
    filled beyond the budget.
    """
    batch, groups = pack(plan)
    assert len(batch.minibatches) == min(plan.num_minibatches, len(groups))
    for minibatch in batch.minibatches:
        assert len(minibatch) == plan.num_ranks
        assert len({len(rank) for rank in minibatch}) == 1
    for row in rows_of(batch):
        assert 0 < sum(row.lengths) == len(row.token_ids) <= BUDGET
        if not row.response_mask.any():
            assert not row.loss_weights.any()
    assert batch.of_rank(0) == tuple(minibatch[0] for minibatch in batch.minibatches)


@quick
@given(PLANS)
def test_a_group_is_never_split_over_minibatches_and_staleness_is_counted_when_trained(plan):
    """Fails when minibatches are divided by samples, or ages are counted before the
    step's version.
    """
    batch, groups = pack(plan)
    homes: dict[int, set[int]] = {}
    for m, minibatch in enumerate(batch.minibatches):
        for row in (row for rank in minibatch for row in rank):
            for prompt_id in set(row.token_ids[row.token_ids >= 10_000].tolist()):
                homes.setdefault(prompt_id, set()).add(m)
    assert len(homes) == len(groups)
    assert all(len(minibatches) == 1 for minibatches in homes.values())
    versions = [v for g in groups for s in g.group.samples for v in s.policy_versions]
    ages = [VERSION - version for version in versions]
    read = batch.metrics.read()
    assert batch.metrics.read()["throughput/trained_tokens"] == len(ages)
    assert read["staleness/age_mean"] == pytest.approx(np.mean(ages))
    assert read["staleness/age_max"] == max(ages)
    of_samples = [set(s.policy_versions) for g in groups for s in g.group.samples]
    assert read["staleness/versions_mean"] == pytest.approx(np.mean(list(map(len, of_samples))))
    assert read["staleness/masked_tokens"] == sum(age > plan.max_staleness for age in ages)
    assert read["staleness/token_frac_age_0"] == pytest.approx(ages.count(0) / len(ages))


def test_tokens_of_a_later_version_are_an_error():
    plan = Plan([[[(VERSION + 1, 3)]]], 1, 1, 5, 1.0)
    with pytest.raises(AssertionError, match="later version"):
        pack(plan)


def test_a_sequence_beyond_the_budget_names_the_setting():
    with pytest.raises(ValueError, match=r"learner\.max_tokens=64"):
        plan_micro_batches([3, 65], num_ranks=1, max_tokens=64, hidden_size=8)
