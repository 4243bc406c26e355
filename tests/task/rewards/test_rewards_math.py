"""Right and wrong answers to mathematical questions."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.answers.extraction import extract_answer
from april_rl.task.rewards.builtin.math_verify import SoftTimeoutError, alarm, score_math

UNUSUAL = [
    (r"\boxed{2} and \boxed{3", 1.0),
    (r"\boxed{}", 0.0),
    (r"\boxed{2", 0.0),
    (r"\boxed{\frac{}{}{{}", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("response", "value"), UNUSUAL)
def test_a_box_that_is_empty_or_never_ends_is_no_answer(response, value):
    """tests/answers has the answers that are equal or not, and several answers in one response."""
    assert score_math(response, "2", soft_timeout_s=60) == value


@given(st.recursive(st.sampled_from(["x", r"\}", r"\{", "\\\\"]), lambda s: s.map("{{{}}}".format)))
def test_braces_in_the_box_are_balanced_and_escaped_ones_do_not_count(content):
    response = rf"\boxed{{1}} then \boxed{{7{content}}} end"
    assert extract_answer(response, "boxed") == f"7{content}"


def test_a_soft_timeout_passes_through_code_that_catches_exceptions():
    def stubborn():
        with alarm(0.05):
            with suppress(SoftTimeoutError):
                time.sleep(5)
            time.sleep(5)

    with pytest.raises(SoftTimeoutError):
        stubborn()


def test_no_alarm_is_left_behind():
    with alarm(0.05):
        pass
    time.sleep(0.2)
