"""Metric values: each kind has its reduction, and means are weighted by their counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.metrics import Histogram, Max, Mean, Metrics, Sum, merge

PARTS = st.lists(st.lists(st.integers(-100, 100), min_size=1), min_size=1, max_size=5)


@given(PARTS)
def test_merged_values_equal_the_values_of_all_parts_combined(parts):
    """Fails when means are averaged without their weights."""
    merged = merge(
        Metrics(
            {"a/mean": Mean(sum(part), len(part)), "a/sum": Sum(sum(part)), "a/max": Max(max(part))}
        )
        for part in parts
    ).read()
    every = [value for part in parts for value in part]
    assert merged["a/mean"] == pytest.approx(sum(every) / len(every))
    assert merged["a/sum"] == sum(every)
    assert merged["a/max"] == max(every)


def test_plain_numbers_are_means_of_one_value_and_keys_keep_their_order():
    metrics = Metrics({"b/x": 2, "a/y": Sum(3)})
    assert metrics["b/x"] == Mean(2.0, 1.0)
    assert list(metrics) == ["b/x", "a/y"]
    assert len(metrics) == 2


def test_a_key_in_only_one_part_is_kept_and_an_empty_mean_is_nan():
    merged = merge([Metrics({"a/x": 1.0}), Metrics({"a/y": Mean(0.0, 0.0)})]).read()
    assert merged["a/x"] == 1.0
    assert math.isnan(merged["a/y"])
    assert merge([]).read() == {}


def test_two_kinds_of_value_under_one_key_are_an_error():
    with pytest.raises(ValueError, match="metric a/x is both a Sum and a Mean"):
        merge([Metrics({"a/x": Sum(1)}), Metrics({"a/x": 1.0})])


# Equal up to rounding, huge, tiny, negative zero and no numbers.
ODD = st.sampled_from([0.0, -0.0, 0.3, 1.0, 1e-320, 1e16, 1e300, 1.7e308, math.inf, math.nan])


@given(st.lists(st.tuples(ODD, st.integers(0, 2), st.sampled_from([1, -1]))))
def test_a_histogram_of_any_numbers_counts_the_finite_ones(drawn):
    """Fails when a run ends because its rewards differ by rounding alone."""
    values = [sign * (each * (1 + ulps * 2.0**-52)) for each, ulps, sign in drawn]
    found = Histogram.of(values)
    assert sum(found.counts) == sum(map(math.isfinite, values))
    assert len(set(found.edges)) == 33
    assert all(map(math.isfinite, found.edges))
