r"""Which answers are mathematically equal: triples of a gold answer, a correct and a wrong one, by
kind.

Each answer of equal_answers.yaml is tried in a box and on an `Answer:` line.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from april_rl.task.rewards.builtin.math_verify import SoftTimeoutError, score_math

KINDS = yaml.safe_load(Path(__file__).with_name("equal_answers.yaml").read_text(encoding="utf-8"))
PAIRS = [
    (gold, answer, direction == "right")
    for golds in KINDS.values()
    for gold, answers in golds.items()
    for direction in ("right", "wrong")
    for answer in answers[direction]
]
# Parts of answers, in any order.
PIECES = r"""
    1 2 0 12 x y f(2) live and or \\ & , ; = : + - ^ _ ' ! % < | { } ( ) [ ] \{ \} \$ \% \frac
    \text{cm} \text{or} \pm \pmod \equiv \cup \in \le \mid \approx \circ \ldots \left \right \log
    \sum \sqrt \begin{cases} \end{cases} A mod am \begin{pmatrix} \end{pmatrix} \langle \rangle
    \overline 1,000 0.
"""


def test_every_gold_answer_has_triples_in_both_directions():
    assert len(PAIRS) >= 300
    assert all(
        answers["right"] and answers["wrong"]
        for golds in KINDS.values()
        for answers in golds.values()
    )


@pytest.mark.parametrize(("gold", "answer", "is_right"), PAIRS)
def test_an_answer_counts_if_it_is_equal_to_the_gold_answer(gold, answer, is_right):
    for form in (r"so \boxed{%s}", "Answer: %s"):
        assert score_math(form % answer, gold, soft_timeout_s=60) == float(is_right), form


SOME_PIECES = st.lists(st.sampled_from(PIECES.split()), max_size=9)


@given(SOME_PIECES, SOME_PIECES)
def test_a_missing_answer_or_gold_answer_makes_the_reward_fail(answer, gold):
    try:
        found = score_math(f"Answer: {' '.join(answer)}", " ".join(gold), soft_timeout_s=20)
    except SoftTimeoutError:
        return
    assert found in (0.0, 1.0)


@pytest.mark.parametrize(
    "piece",
    ["(", "{}", r"\frac{", "1,", "=1", "x", "1 ", ": ", "a is ", "-", " ", "$", ". I hope "],
)
def test_a_long_answer_takes_little_time(piece):
    """CPU time, because other programs may keep this one waiting."""
    start_s = time.process_time()
    assert score_math(rf"\boxed{{1x{piece * 50_000}x}}", "1", soft_timeout_s=20) == 0.0
    assert score_math(f"Answer: 1x{piece * 50_000}x", "1", soft_timeout_s=20) == 0.0
    assert time.process_time() - start_s < 3


def test_nested_brackets_take_little_time():
    """Fails when the LaTeX parser gets them, which takes seconds for ten levels."""
    start_s = time.monotonic()
    assert score_math(rf"\boxed{{{'(' * 60}x+1{')' * 60}}}", "x+2", soft_timeout_s=20) == 0.0
    assert time.monotonic() - start_s < 3
