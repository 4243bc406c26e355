"""avg@k, pass@k, maj@k and their intervals, compared with closed forms, enumeration and published
values.
"""

from itertools import combinations, product

import numpy as np
import pytest

from april_rl.task.evaluation.estimators import averages, majorities, passes
from april_rl.task.evaluation.intervals import bootstrap, estimate, paired_difference, wilson

REWARDS = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_the_subsets_with_a_right_sample(k: int) -> None:
    """Chen et al. count subsets without listing them. Fails when samples are drawn with
    replacement.
    """
    expected = [
        np.mean([max(subset) for subset in combinations(row, k)]) for row in REWARDS.tolist()
    ]
    assert passes(REWARDS, k=k) == pytest.approx(expected)
    if k == 1:
        assert passes(REWARDS, k=k) == pytest.approx(averages(REWARDS))


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@6 needs at least 6 samples of each prompt, got 5"):
        passes(REWARDS, k=6)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["4", "4", "5"], [1, 1, 0], 1.0),
        (["4", "5", "5"], [1, 0, 0], 0.0),
        (["4", "5", None], [1, 0, 0], 0.5),  # a tie is shared
        (["4", "5", "6"], [1, 0, 0], 1 / 3),
        ([None, None, "4"], [0, 0, 1], 1.0),  # samples without an answer have no vote
        ([None, None, None], [0, 0, 0], 0.0),
        (["4", "4", "4"], [1, 1, 0], 2 / 3),  # the reward depends on more than the answer
        # All forms of the right answer are one; those of a wrong one are compared as text.
        (["0.5", r"\frac12", "1/2", "2", "2"], [1, 1, 1, 0, 0], 1.0),
        (["2", "0.5", r"\frac12", "2", "2"], [1, 0, 0, 1, 1], 1.0),
        (["1/2", "0.5", "2", "2"], [1, 0, 0, 0], 0.0),
        (["1/2", "0.5", "0.5", "2", "2"], [1, 1, 0, 0, 0], 2 / 3),
        (["a", "b", "c", "c"], [0.7, 0.7, 0, 0], 0.0),  # a part of the reward makes none equal
        ([None, "4", "5", "5"], [1, 1, 0, 0], 0.0),
    ],
)
def test_the_most_frequent_answer_decides(
    answers: list[str | None], rewards: list[int], expected
) -> None:
    """Fails when ties go to the first or the right answer, or samples without an answer vote
    together.
    """
    assert majorities([rewards], [answers]) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_equals_newcombes_table(
    successes: int, trials: int, low: float, high: float
) -> None:
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I."""
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_the_bootstrap_equals_all_resamples() -> None:
    """All 6**6 resamples of six prompts. Fails with another tail, or when sampling without
    replacement.
    """
    values = np.array([0.1, 0.9, 0.25, 0.6, 0.0, 1.0])
    every = [np.mean(drawn) for drawn in product(values, repeat=len(values))]
    assert bootstrap(values) == pytest.approx(np.percentile(every, [2.5, 97.5]), abs=0.01)


def test_rewards_beyond_0_and_1_get_the_bootstrap() -> None:
    """Their range is unknown. Fails when an interval for proportions is used, which ends at 1."""
    rewards = np.random.default_rng(1).normal(3.0, 2.0, 50)
    found = estimate(rewards)
    assert found.low < rewards.mean() < found.high
    assert found.high > 3
    assert found == estimate(rewards), "the seed is fixed"
    assert paired_difference(rewards, rewards + 5) == pytest.approx((5, 5, 5))


def simulate(rng: np.random.Generator, prompts: int, k: int, mean: float) -> np.ndarray:
    """Return the values of 600 test sets [600, prompts], whose prompts differ in difficulty."""
    chances = rng.beta(1.2 * mean, 1.2 * (1 - mean), (600, prompts))
    return rng.binomial(k, chances) / k


@pytest.mark.parametrize(
    ("prompts", "k", "mean"),
    [(15, 16, 0.5), (30, 1, 0.5), (30, 4, 0.95), (30, 16, 0.02), (200, 4, 0.02), (200, 16, 0.5)],
)
def test_intervals_have_their_nominal_coverage(prompts: int, k: int, mean: float) -> None:
    """600 sets, ± 1.8 points. Fails when prompts are resampled (78 % for 30, 16, 0.02) or when the
    samples of a prompt count as independent (56 % for 200, 16, 0.5).
    """
    drawn = simulate(np.random.default_rng(2), prompts, k, mean)
    found = [estimate(values) for values in drawn]
    covered = np.mean([each.low <= mean <= each.high for each in found])
    assert 0.925 < covered < 0.985


@pytest.mark.parametrize(("prompts", "k", "mean"), [(30, 4, 0.02), (30, 16, 0.5), (200, 4, 0.2)])
def test_intervals_of_differences_have_their_nominal_coverage(
    prompts: int, k: int, mean: float
) -> None:
    """Both sets come from one model, so the true difference is 0."""
    rng = np.random.default_rng(3)
    chances = rng.beta(1.2 * mean, 1.2 * (1 - mean), (600, prompts))
    drawn = (rng.binomial(k, chances) / k, rng.binomial(k, chances) / k)
    found = [paired_difference(*pair) for pair in zip(*drawn, strict=True)]
    assert np.mean([each.low <= 0 <= each.high for each in found]) > 0.93


@pytest.mark.parametrize("k", [2, 4, 16, 64])
def test_one_more_sample_changes_an_interval_only_a_little(k: int) -> None:
    """Fails when equal values get another kind of interval than all others: with 30 prompts all
    right it was [0.886, 1.000], and with one of 120 samples wrong [0.975, 1.000].
    """
    zeros, one_more = np.zeros(30), np.array([1 / k, *np.zeros(29)])
    for equal in (zeros, np.ones(30)):
        before, after = estimate(equal), estimate(abs(equal - one_more))
        assert after == pytest.approx(before, abs=0.08 / k**0.5)
    before, after = paired_difference(zeros, zeros), paired_difference(zeros, one_more)
    assert after == pytest.approx(before, abs=0.08 / k**0.5)
    assert estimate(np.full(30, 1 / 2)).high > 0.51, "equal values are not certain"


@pytest.mark.parametrize("mean", [0.005, 0.1, 0.5])
def test_intervals_lie_between_0_and_1_and_are_symmetric_in_right_and_wrong(mean: float) -> None:
    for values in simulate(np.random.default_rng(4), 12, 4, mean)[:100]:
        found, other = estimate(values), estimate(1 - values)
        assert 0 <= found.low <= found.value <= found.high <= 1
        assert other == pytest.approx((1 - found.value, 1 - found.high, 1 - found.low))


def test_with_one_sample_per_prompt_it_is_wilsons_interval() -> None:
    values = np.array([1.0] * 15 + [0.0] * 133)
    assert estimate(values)[1:] == pytest.approx((0.0624, 0.1605), abs=5e-5)


@pytest.mark.parametrize("right", [0, 1])
def test_the_interval_of_a_set_that_is_all_wrong_or_all_right_has_a_width(right: int) -> None:
    """Fails when the set is resampled: thirty zeros stay thirty zeros."""
    found = estimate(averages(np.full((30, 8), right)))
    assert found.value == right
    assert found.high - found.low == pytest.approx(0.1135, abs=1e-4)  # the value is z² / (30 + z²)


@pytest.mark.parametrize("pairs", [1, 8, 30, 500])
def test_two_models_that_agree_on_every_prompt_may_still_differ(pairs: int) -> None:
    """Calculated by hand: without a pair that differs, the score test accepts d while n·d² <=
    z²·d·(1 - d), which means up to z² / (n + z²). Fails when prompts are resampled.
    """
    half = 1.959964**2 / (pairs + 1.959964**2)
    for values in (np.ones(pairs), np.zeros(pairs), np.full(pairs, 0.25)):
        assert paired_difference(values, values) == pytest.approx((0.0, -half, half), abs=1e-6)


@pytest.mark.parametrize(
    ("gained", "lost", "pairs"),
    [(1, 0, 30), (0, 1, 44), (5, 0, 5), (12, 2, 100), (9, 9, 20), (0, 7, 40), (30, 25, 60)],
)
def test_the_interval_of_paired_proportions_ends_where_the_score_test_rejects(
    gained: int, lost: int, pairs: int
) -> None:
    """A grid instead of a formula finds the most likely shares under each hypothesis. Fails when
    gained and lost are swapped, or the variance is not computed under the hypothesis.
    """
    kept = []
    for difference in np.linspace(-1, 1, 401):
        shares = np.linspace(max(0.0, -difference), (1 - difference) / 2, 4001)
        counts = (
            (gained, shares + difference),
            (lost, shares),
            (pairs - gained - lost, 1 - 2 * shares - difference),
        )
        with np.errstate(divide="ignore"):
            likelihood = sum(n * np.log(np.maximum(share, 0)) for n, share in counts if n)
        share = shares[int(np.argmax(likelihood))]
        variance = pairs * (2 * share + difference - difference**2)
        if (gained - lost - pairs * difference) ** 2 <= 1.96**2 * variance + 1e-9:
            kept.append(difference)
    first = np.array([0.0] * gained + [1.0] * lost + [1.0] * (pairs - gained - lost))
    second = np.array([1.0] * gained + [0.0] * lost + [1.0] * (pairs - gained - lost))
    found = paired_difference(first, second)
    assert found.value == pytest.approx((gained - lost) / pairs)
    assert (found.low, found.high) == pytest.approx((min(kept), max(kept)), abs=0.006)


def test_differences_are_paired() -> None:
    """Prompts differ far more than the two models. Fails when the two sets are treated as
    independent.
    """
    rng = np.random.default_rng(3)
    chances = rng.beta(0.5, 0.5, 400)
    first, second = rng.binomial(16, chances) / 16, rng.binomial(16, chances**0.9) / 16
    found = paired_difference(first, second)
    half = 1.96 * (second - first).std() / 20
    assert found == pytest.approx((found.value, found.value - half, found.value + half), abs=2e-3)
    assert found.low > 0.005
    assert estimate(first).high > estimate(second).low
    other = paired_difference(second, first)
    assert other == pytest.approx((-found.value, -found.high, -found.low))
