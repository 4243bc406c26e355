"""Responses in a row, and the weights and masks of tokens that another policy sampled."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april_rl.training.algorithm.losses import LossInputs
from april_rl.training.algorithm.off_policy import (
    geometric_mask,
    masked_importance_weights,
    negative_mask,
    sequence_importance_weights,
    token_mask,
    truncated_importance_weights,
)
from april_rl.training.algorithm.responses import Responses

LENGTHS = st.lists(st.integers(0, 6), max_size=6)
RATIOS = [0.4, 0.5, 1.0, 2.0, 5.0, 8.0]


def behaviour_of(ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return learner and engine log-probabilities with these ratios; the learner's have
    a gradient.
    """
    behaviour = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    learner = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    return learner.requires_grad_(), behaviour


@given(LENGTHS)
def test_every_token_gets_the_sum_and_mean_of_its_own_response(lengths):
    """Empty responses included. Planted bug: lengths are used as starts."""
    values = torch.arange(1, sum(lengths) + 1, dtype=torch.float64)
    responses = Responses.of(lengths)
    parts = [part.tolist() for part in values.split(lengths)] if lengths else []
    sums = [math.fsum(part) for part in parts]
    assert responses.sums(values).tolist() == sums
    means = [total / len(part) if part else 0.0 for total, part in zip(sums, parts, strict=True)]
    assert responses.means(values).tolist() == pytest.approx(means)
    spread = [total for total, part in zip(sums, parts, strict=True) for _ in part]
    assert responses.spread(responses.sums(values)).tolist() == spread


def test_a_long_responses_sum_does_not_lose_its_small_parts():
    """50,000 log-ratios of 1e-4 in float32. Adding them one at a time in float32 is wrong by 5e-4.
    Planted bug: that sum.
    """
    values = torch.full((50_000,), 1e-4)
    exact = 50_000 * float(torch.tensor(1e-4))
    assert Responses.of([50_000]).sums(values).item() == pytest.approx(exact, rel=1e-6)


def test_sums_and_means_pass_autograds_own_check():
    responses = Responses.of([2, 0, 3])
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: responses.spread(responses.means(v)) ** 2, (values,))


def test_token_weights_are_clipped_and_masked_weights_are_dropped():
    """Planted bugs: IcePop clamps to its bounds; its lower bound is ignored."""
    learner, behaviour = behaviour_of(RATIOS)
    cut = truncated_importance_weights(learner, behaviour, cap=2.0)
    assert cut.tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 2.0, 2.0])
    dropped = masked_importance_weights(learner, behaviour, low=0.45, high=5.5)
    assert dropped.tolist() == pytest.approx([0.0, 0.5, 1.0, 2.0, 5.0, 0.0])
    mask = token_mask(learner, behaviour, low=0.45, high=5.5)
    assert mask.tolist() == [0, 1, 1, 1, 1, 0]


def test_infinite_bounds_change_nothing():
    learner, behaviour = behaviour_of(RATIOS)
    responses = Responses.of([2, 4])
    assert token_mask(learner, behaviour, low=0.0, high=math.inf).tolist() == [1] * 6
    kept = geometric_mask(learner, behaviour, responses=responses, low=0.0, high=math.inf)
    assert kept.tolist() == [1] * 6
    plain = truncated_importance_weights(learner, behaviour, cap=math.inf)
    assert plain.tolist() == pytest.approx(RATIOS)


def test_weights_without_a_cap_stay_finite_where_float32_overflows():
    behaviour, learner = torch.full((3,), -100.0), torch.zeros(3)
    weights = truncated_importance_weights(learner, behaviour, cap=math.inf)
    assert weights.isfinite().all()
    responses = Responses.of([1, 2])
    of_whole = sequence_importance_weights(learner, behaviour, responses=responses, cap=math.inf)
    assert of_whole.isfinite().all()


def test_a_sequence_weight_is_the_product_over_its_response():
    """Planted bug: the product over the whole row."""
    learner, behaviour = behaviour_of([0.5, 0.5, 3.0, 1.0, 2.0])
    weights = sequence_importance_weights(
        learner, behaviour, responses=Responses.of([2, 3]), cap=5.0
    )
    assert weights.tolist() == pytest.approx([0.25, 0.25, 5.0, 5.0, 5.0])


def test_a_geometric_mask_uses_the_mean_of_a_response():
    """Two tokens with ratio 1.2, and eight of them: the mean is the same, the product is not.
    Planted bug: the product is compared.
    """
    learner, behaviour = behaviour_of([1.2] * 10)
    responses = Responses.of([2, 8])
    by_mean = geometric_mask(learner, behaviour, responses=responses, low=0.5, high=1.25)
    assert by_mean.tolist() == [1] * 10
    narrow = geometric_mask(learner, behaviour, responses=responses, low=0.5, high=1.19)
    assert narrow.tolist() == [0] * 10


@given(
    st.lists(
        st.tuples(st.lists(st.floats(-3, 3), min_size=1, max_size=5), st.floats(-2, 2)), max_size=6
    ),
    st.sampled_from([0.01, 0.5, 1.0]),
)
def test_a_negative_mask_leaves_out_bad_responses_that_have_become_unlikely(drawn, threshold):
    """Planted bugs: good responses too; the sum of a response; learner minus engine."""
    gaps = [gap for part, _ in drawn for gap in part]
    behaviour = torch.linspace(-3, -1, len(gaps), dtype=torch.float64)
    learner = behaviour - torch.tensor(gaps, dtype=torch.float64)
    advantages = [a for part, a in drawn for _ in part]
    means = [(math.fsum(part) / len(part), a) for part, a in drawn for _ in part]
    inputs = LossInputs(
        logprobs=learner.requires_grad_(),
        anchor_logprobs=behaviour,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        behaviour_logprobs=behaviour,
        responses=Responses.of([len(part) for part, _ in drawn]),
    )
    found = negative_mask(inputs, threshold=threshold)
    assert not found.requires_grad
    for value, (mean, a) in zip(found.tolist(), means, strict=True):
        if abs(mean - threshold) > 1e-9:  # closer to the bound, rounding decides
            assert value == (0.0 if a < 0 and mean > threshold else 1.0)


def test_a_negative_mask_uses_each_tokens_own_advantage():
    """Advantages of turns differ within a response; the divergence is still that of the whole
    response.
    """
    inputs = LossInputs(
        logprobs=torch.tensor([-3.0, 0.0, 0.0]),
        anchor_logprobs=torch.zeros(3),
        advantages=torch.tensor([1.0, -1.0, 0.0]),
        behaviour_logprobs=torch.zeros(3),
        responses=Responses.of([3]),
    )
    assert negative_mask(inputs, threshold=0.5).tolist() == [1.0, 0.0, 1.0]


def test_an_overflowing_product_is_masked_or_capped_and_never_nan():
    """2,000 tokens with ratio e, and with 1/e, in float32. Planted bug: bounds are compared after
    exp, and the product itself is multiplied in.
    """
    log_ratios = torch.cat([torch.ones(2000), -torch.ones(2000)])
    behaviour, responses = torch.zeros(4000), Responses.of([2000, 2000])
    weights = sequence_importance_weights(log_ratios, behaviour, responses=responses, cap=2.0)
    assert weights[[0, -1]].tolist() == [2.0, 0.0]


def test_weights_and_masks_have_no_gradient():
    learner, behaviour = behaviour_of(RATIOS)
    responses = Responses.of([2, 4])
    bounds = {"low": 0.5, "high": 2.0}
    found = [
        truncated_importance_weights(learner, behaviour, cap=2.0),
        masked_importance_weights(learner, behaviour, **bounds),
        token_mask(learner, behaviour, **bounds),
        sequence_importance_weights(learner, behaviour, responses=responses, cap=2.0),
        geometric_mask(learner, behaviour, responses=responses, **bounds),
    ]
    assert [weights.requires_grad for weights in found] == [False] * 5
