"""Right and wrong answers to mathematical questions."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.answers.extraction import extract_answer
from april_rl.task.rewards.builtin.math_verify import SoftTimeoutError, alarm, score_math

RIGHT = [
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{70,000}", "70000"),
    (r"\boxed{(2, 3)}", "(2,3)"),
    (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}"),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2"),
    (r"\boxed{B}", "B"),
    (r"\boxed{4}", r"\boxed{4}"),
    (r"\boxed{2} and \boxed{3", "2"),
]
WRONG = [
    (r"\boxed{3}", "4"),
    ("the answer is 4", "4"),
    (r"first \boxed{1}, no: \boxed{2}", "2"),
    (r"\boxed{4} or \boxed{5}", "4"),
    (r"\boxed{}", "4"),
    (r"\boxed{4", "4"),
    (r"\boxed{\frac{}{}{{}", "4"),
    ("", "4"),
]


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_a_box_with_an_equal_expression_is_right(response, answer):
    assert score_math(response, answer, soft_timeout_s=60) == 1.0


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_another_expression_or_no_box_is_wrong(response, answer):
    assert score_math(response, answer, soft_timeout_s=60) == 0.0


@given(st.recursive(st.sampled_from(["x", r"\}", r"\{", "\\\\"]), lambda s: s.map("{{{}}}".format)))
def test_braces_in_the_box_are_balanced_and_escaped_ones_do_not_count(content):
    response = rf"\boxed{{1}} then \boxed{{7{content}}} end"
    assert extract_answer(response, "boxed") == f"7{content}"


def test_an_answer_that_takes_too_long_is_a_soft_timeout_and_not_wrong():
    start_s = time.monotonic()
    with pytest.raises(SoftTimeoutError):
        score_math(r"\boxed{10^{10^8}}", "1", soft_timeout_s=0.3)
    assert time.monotonic() - start_s < 20


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
