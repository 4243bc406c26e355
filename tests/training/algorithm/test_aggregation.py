"""Loss weights from lengths, masks and age weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.training.algorithm.age import age_weights, decay
from april_rl.training.algorithm.aggregation import constant_length, sequence_mean, token_mean

WEIGHTS = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9), max_size=6
)


def arrays(token_weights: list[list[float]]) -> list[np.ndarray]:
    return [np.asarray(weights, np.float32) for weights in token_weights]


def flat(loss_weights: list[np.ndarray]) -> list[float]:
    return [float(weight) for weights in loss_weights for weight in weights]


def test_complete_fresh_responses_get_the_textbook_weights():
    """Two responses of 1 and 4 tokens. Planted bugs: token mean per response; the longest response
    instead of the budget.
    """
    fresh = arrays([[1.0], [1.0] * 4])
    assert flat(token_mean(fresh)) == pytest.approx([1 / 5] * 5)
    assert flat(sequence_mean(fresh)) == pytest.approx([1 / 2] + [1 / 8] * 4)
    assert flat(constant_length(fresh, max_response_tokens=10)) == pytest.approx([1 / 20] * 5)


def test_a_masked_token_and_a_masked_response_are_not_counted():
    """The weights are as if they did not exist. Planted bug: a masked token counts in its
    response's length.
    """
    masked = arrays([[1.0, 0.0, 1.0], [0.0, 0.0], [1.0]])
    assert flat(token_mean(masked)) == pytest.approx([1 / 3, 0, 1 / 3, 0, 0, 1 / 3])
    assert flat(sequence_mean(masked)) == pytest.approx([1 / 4, 0, 1 / 4, 0, 0, 1 / 2])
    constant = constant_length(masked, max_response_tokens=4)
    assert flat(constant) == pytest.approx([1 / 8, 0, 1 / 8, 0, 0, 1 / 8])


def test_age_weights_give_stale_tokens_less_weight_than_fresh_ones():
    """A fresh and a stale response of two tokens with weight 1/2: they get two thirds and one
    third. Planted bug: each response is divided by the sum of its own age weights, so that an
    entirely stale one loses nothing.
    """
    weights = arrays([[1.0, 1.0], [0.5, 0.5]])
    for aggregation in (token_mean, sequence_mean):
        assert flat(aggregation(weights)) == pytest.approx([1 / 3, 1 / 3, 1 / 6, 1 / 6])
    constant = constant_length(weights, max_response_tokens=2)
    assert flat(constant) == pytest.approx([1 / 4, 1 / 4, 1 / 8, 1 / 8])


@pytest.mark.parametrize("aggregation", [token_mean, sequence_mean])
@given(token_weights=WEIGHTS)
def test_mean_weights_add_up_to_one_unless_nothing_is_trained(aggregation, token_weights):
    given_weights = arrays(token_weights)
    total = sum(flat(aggregation(given_weights)))
    assert total == pytest.approx(float(any(weights.any() for weights in given_weights)), abs=1e-6)


@given(token_weights=WEIGHTS)
def test_loss_weights_are_zero_exactly_where_token_weights_are(token_weights):
    for aggregation in (
        token_mean,
        sequence_mean,
        lambda weights: constant_length(weights, max_response_tokens=8),
    ):
        given_weights = arrays(token_weights)
        found = aggregation(given_weights)
        for weights, loss_weights in zip(given_weights, found, strict=True):
            assert loss_weights.dtype == np.float32
            assert loss_weights.shape == weights.shape
            assert ((weights > 0) == (loss_weights > 0)).all()


def test_age_weights_decay_by_a_power_or_as_a_function_says():
    ages = np.asarray([0, 0, 3, 1], np.int32)
    assert age_weights(ages, weight_of_age=decay(0.5)).tolist() == [1.0, 1.0, 0.125, 0.5]
    assert age_weights(ages, weight_of_age=decay(1.0)).tolist() == [1.0] * 4
    assert age_weights(ages, weight_of_age=decay(0.0)).tolist() == [1.0, 1.0, 0.0, 0.0]
    hyperbolic = age_weights(ages, weight_of_age=lambda age: 1 / (1 + age))
    assert hyperbolic.tolist() == [1.0, 1.0, 0.25, 0.5]
    assert age_weights(np.zeros(0, np.int32), weight_of_age=decay(0.5)).shape == (0,)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_an_age_weight_that_is_negative_or_nan_is_refused_by_name(weight):
    with pytest.raises(ValueError, match="age 2"):
        age_weights(
            np.asarray([0, 2], np.int32), weight_of_age=lambda age: weight if age == 2 else 1.0
        )
