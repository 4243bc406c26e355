"""Metric values: each kind has its reduction, and means are weighted by their counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.metrics import Max, Mean, Metrics, Sum, merge

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
