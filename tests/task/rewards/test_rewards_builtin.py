"""The values of the built-in reward functions, also for responses that they cannot read."""

from __future__ import annotations

import json

import pytest
from reward_pools import CONTEXT

from april_rl.task.rewards.builtin.short import has_form, score_exact, score_last_number
from april_rl.task.rewards.builtin.short import length as build_length
from april_rl.task.rewards.functions import RewardFunction
from april_rl.task.rewards.jobs import DecodedJob
from april_rl.task.rewards.loading import load_reward
from april_rl.types import Prompt


@pytest.mark.parametrize(
    ("response", "answer", "how", "value"),
    [
        (r"\boxed{1,000}", "1000", "auto", 1.0),
        ("Answer: $x = 2$.", "x=2", "auto", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", "boxed", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", "boxed", 0.0),
        (r"\boxed{2} \boxed{3}", "3", "auto", 0.0),
        (r"\boxed{3} \boxed{ 3 }", "3", "auto", 1.0),
        ("the answer is 3", "3", "auto", 0.0),
        ("the answer is 3", "3", "last_number", 1.0),
    ],
)
def test_exact_compares_the_text_of_the_answer(response, answer, how, value):
    assert score_exact(response, answer, how=how) == value


@pytest.mark.parametrize(
    ("response", "answer", "how", "value"),
    [
        ("2 + 3 = 5.", "5", "auto", 1.0),
        ("2 + 3 = 5.", "5", "boxed", 0.0),
        ("2 + 3 = 5.0", "#### 5", "last_number", 1.0),
        (r"\boxed{5} as on page 7", "5", "auto", 1.0),
        (r"\boxed{5} as on page 7", "5", "last_number", 0.0),
        ("Answer: 5\nAnswer: 6", "6", "auto", 0.0),
        ("1/2", "0.5", "auto", 1.0),
        ("1,250 dollars", "1250", "auto", 1.0),
        ("many", "5", "auto", 0.0),
        ("5", "many", "auto", 0.0),
        ("1/0", "5", "auto", 0.0),
        ("1e999999999", "5", "auto", 0.0),
        ("9" * 100_000, "5", "auto", 0.0),
        ("<think>5", "5", "auto", 0.0),
    ],
)
def test_last_number_compares_values(response, answer, how, value):
    assert score_last_number(response, answer, how=how) == value


@pytest.mark.parametrize(
    ("response", "thinking", "is_right"),
    [
        (r"<think>a</think>\boxed{1}", True, True),
        ("a</think>Answer: 1", True, True),
        (r"\boxed{1}", True, False),
        (r"<think>\boxed{1}</think>", True, False),
        (r"<think>a</think>b</think>\boxed{1}", True, False),
        (r"a<think>b</think>\boxed{1}", True, False),
        (r"<think>\boxed{1}", True, False),
        (r"\boxed{1}", False, True),
        (r"<think>a</think>\boxed{1}", False, False),
        ("1", False, False),
    ],
)
def test_format_requires_thinking_and_then_an_answer(response, thinking, is_right):
    assert has_form(response, how="auto", thinking=thinking) is is_right


def lengths(num_tokens, **args):
    empty = [""] * len(num_tokens)
    return build_length(CONTEXT, **args).call(empty, empty, empty, num_tokens=num_tokens)


def test_length_goes_from_one_value_to_the_other():
    linear = lengths([0, 10, 15, 20, 99], start_tokens=10, end_tokens=20)
    assert linear == [0.0, 0.0, -0.5, -1.0, -1.0]
    args = {"start_tokens": 0, "end_tokens": 12, "start_value": 1.0, "end_value": 0.0}
    cosine = lengths([0, 4, 6, 12], shape="cosine", **args)
    assert cosine == pytest.approx([1.0, 0.75, 0.5, 0.0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"start_tokens": 5, "end_tokens": 5}, r"args\.end_tokens=5 must be above"),
        ({"start_tokens": 0, "end_tokens": 5, "shape": "round"}, r"args\.shape=round must be one"),
    ],
)
def test_a_length_reward_that_makes_no_sense_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        lengths([0], **args)


def gym_value(task, response, **entry):
    columns = {"entry": json.dumps({"task": task, **entry})}
    prompt = Prompt(id=0, token_ids=(), text="", answer="", source="", columns=columns)
    function = RewardFunction(name="gym", key="reward.function", function="reasoning_gym")
    loaded = load_reward(function, CONTEXT)
    assert loaded.columns == ("entry",)
    (score,) = loaded.scores(function, DecodedJob.of(prompt, [response]))
    assert score.outcome == "scored", score.message
    return score.value


def test_reasoning_gym_uses_the_tasks_own_verifier():
    pytest.importorskip("reasoning_gym")
    gcd = {"question": "gcd of 4 and 6?", "answer": "2", "metadata": {}}
    assert gym_value("gcd", r"\boxed{2}", **gcd) == 1.0
    assert gym_value("gcd", r"\boxed{3}", **gcd) == 0.0
    assert gym_value("gcd", r"\boxed{2} \boxed{3}", **gcd) == 0.0
    assert gym_value("gcd", "2", **gcd) == 0.0
    # The task's own verifier gives 0.5 for a text that contains the answer.
    assert gym_value("gcd", r"\boxed{22}", **gcd) == 0.0


@pytest.mark.parametrize(("text", "value"), [("1 + 2i", 1), ("nan", 0), ("NaN + 2i", 0), ("x", 0)])
def test_nan_is_no_answer_unless_it_is_the_right_one(text, value):
    """The verifier of complex_arithmetic gives 1 to nan, which is at no distance."""
    pytest.importorskip("reasoning_gym")
    sums = {"question": "1 + 2i + 0?", "answer": "1 + 2i", "metadata": {"result": [1.0, 2.0]}}
    assert gym_value("complex_arithmetic", f"\\boxed{{{text}}}", **sums) == value
    assert gym_value("spell_backward", r"\boxed{nan}", question="nan?", answer="nan") == 1.0


def test_a_verifier_that_raises_gives_zero():
    """The verifier of this task raises on a text that is not a product."""
    pytest.importorskip("reasoning_gym")
    entry = {"question": "factor 6", "answer": "2 × 3", "metadata": {"factors": [2, 3]}}
    assert gym_value("prime_factorization", r"\boxed{two times three}", **entry) == 0.0
    assert gym_value("prime_factorization", r"\boxed{2 × 3}", **entry) == 1.0
