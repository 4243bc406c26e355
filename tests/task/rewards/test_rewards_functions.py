"""Several reward functions, whole groups, data columns, arguments, and missing scores."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from light_samples import whole_sample
from reward_pools import reward_pool

from april_rl.config.task import RewardConfig, RewardFunctionConfig
from april_rl.task.rewards.check import check_reward
from april_rl.task.rewards.jobs import RewardError
from april_rl.task.rewards.loading import describe_wrong, read_values
from april_rl.training.rollout.measures.reward_metrics import reward_metrics
from april_rl.types import Group, Prompt, ScoredGroup


def prompt(number=0, *, answer="2", dataset="", **columns):
    return Prompt(
        id=number,
        token_ids=(1,),
        text="1 + 1 = ",
        answer=answer,
        source="f:1",
        dataset=dataset,
        columns=columns,
    )


def sample(asked, index, response, *, finish_reason="stop"):
    token_ids = tuple(map(ord, response))
    return whole_sample(asked, index, token_ids, finish_reason=finish_reason)


def pool(**settings):
    settings = {"num_processes": 1, "hard_timeout_s": 20.0} | settings
    return reward_pool(RewardConfig(**settings))


def functions(**chosen):
    return {name: RewardFunctionConfig(**settings) for name, settings in chosen.items()}


TWO = functions(
    right={"function": "math_verify", "weight": 2.0},
    place={"function": "reward_functions:rank", "weight": -0.5},
)


def test_the_reward_is_the_weighted_sum_and_each_value_is_kept():
    with pool(functions=TWO) as scorer:
        for index, response in enumerate((r"\boxed{2}", r"so \boxed{2}", "no")):
            scorer.submit(sample(prompt(), index, response), group_size=3)
        scores = scorer.collect(None)
    assert [score.value for score in scores] == [1.5, 1.0, 0.0]
    assert scores[1].parts == (("right", 1.0), ("place", 2.0))


def test_a_group_is_scored_after_its_last_sample_without_delaying_other_groups():
    """Fails when `collect(None)` waits for siblings that have not been submitted yet."""
    with pool(function="reward_functions:rank") as scorer:
        scorer.submit(sample(prompt(0), 1, "aa"), group_size=2)
        assert scorer.collect(None) == []
        assert scorer.collect(5.0) == []
        for number, response in ((0, "b"), (1, "ccc")):  # a second group, with another size
            scorer.submit(sample(prompt(-7), number, response), group_size=2)
        assert [score.sample_id.prompt_id for score in scorer.collect(None)] == [-7, -7]
        scorer.submit(sample(prompt(0), 0, "bbb"), group_size=2)
        scores = scorer.collect(None)
        assert [(score.sample_id.index, score.value) for score in scores] == [(1, 0.0), (0, 1.0)]


def test_functions_of_one_sample_do_not_wait_for_siblings():
    both = functions(right={"function": "math_verify"}, form={"function": "format"})
    with pool(functions=both) as scorer:
        scorer.submit(sample(prompt(), 0, r"a</think>\boxed{2}"), group_size=8)
        (score,) = scorer.collect(None)
    assert (score.value, score.parts) == (2.0, (("right", 1.0), ("form", 1.0)))


def test_scores_of_a_group_are_returned_together_even_if_one_fails():
    """Otherwise, saving only the samples without a score would save a part of a group, which never
    becomes complete again.
    """
    chosen = functions(
        told={"function": "exact"}, place={"function": "reward_functions:unsure", "weight": 0.0}
    )
    with pool(functions=chosen) as scorer:
        for index, response in enumerate((r"\boxed{2}", "odd", "no")):
            assert scorer.collect(0) == []
            scorer.submit(sample(prompt(), index, response), group_size=3)
        scores = scorer.collect(None)
        assert [score.outcome for score in scores] == ["scored", "no_score", "scored"]
        assert (
            "place.function=reward_functions:unsure gave no score for this response"
            in scores[1].message
        )
        metrics = scorer.metrics().read()
    assert (metrics["reward/errors"], metrics["reward/no_scores"]) == (1, 1)
    assert metrics["reward/retries"] == 1


def test_a_restored_group_may_have_less_to_score_than_its_size():
    with pool(function="reward_functions:group_size") as scorer:
        scorer.submit(sample(prompt(), 3, "a"), group_size=2)
        scorer.submit(sample(prompt(), 4, "a"), group_size=8)
        assert [score.value for score in scorer.collect(None)] == [2.0, 2.0]


def test_a_function_may_be_asynchronous_and_take_arguments():
    with pool(function="reward_functions:group_size", args={"base": 10}) as scorer:
        for index in (0, 1):
            scorer.submit(sample(prompt(), index, "a"), group_size=2)
        assert [score.value for score in scorer.collect(None)] == [12.0, 12.0]


def test_a_function_gets_the_columns_and_facts_that_it_names():
    settings = {"function": "reward_functions:with_columns", "args": {"unit": 3}}
    with pool(**settings) as scorer:
        asked = prompt(difficulty=2, unused="x")
        scorer.submit(sample(asked, 0, "abc"), group_size=2)
        scorer.submit(sample(asked, 1, "ab", finish_reason="length"), group_size=2)
        assert [score.value for score in scorer.collect(None)] == [36.0, 126.0]
        assert scorer.columns_of("any") == ("difficulty",)


@pytest.mark.parametrize(("name", "value"), [("in_another_order", 2183.0), ("by_place", 23.0)])
def test_a_function_gets_prompts_responses_and_answers_by_their_names(name, value):
    with pool(function=f"reward_functions:{name}") as scorer:
        scorer.submit(sample(prompt(difficulty=2), 0, "abc"), group_size=1)
        assert [score.value for score in scorer.collect(None)] == [value]
        assert scorer.columns_of("any") == ("difficulty",)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (np.array([1, 0]), [1.0, 0.0]),
        (np.array([True, False]), [1.0, 0.0]),
        ([np.True_, np.float32(0.5)], [1.0, 0.5]),
        ([np.array([0.5]), np.array(2)], [0.5, 2.0]),
        (np.array([[0.5], [2.0]]), [0.5, 2.0]),
        (torch.tensor([0.5, 2.0], requires_grad=True), [0.5, 2.0]),
        (torch.tensor([0.5, 2.0], dtype=torch.bfloat16), [0.5, 2.0]),
        ([torch.tensor(True), torch.tensor([[0.5]])], [1.0, 0.5]),
        ((Fraction(1, 2), Decimal("0.25")), [0.5, 0.25]),
        (np.array([None, 1.0], dtype=object), [None, 1.0]),
    ],
)
def test_any_finite_number_is_a_reward(returned, expected):
    assert read_values(returned, 2) == expected


@pytest.mark.parametrize(
    "returned",
    [
        np.array([1.0, np.nan]),
        torch.tensor([1.0, float("inf")]),
        torch.tensor([1.0]),
        torch.zeros(2, 2),
        torch.tensor(1.0),
        np.array(1.0),
        np.float64(1.0),
        [torch.zeros(2), torch.zeros(2)],
        [[1.0], [0.0]],
        [1j, 0.0],
        np.array(["1", "0"]),
        ["1", "0"],
        "10",
        {1.0, 0.0},
        {0: 1.0, 1: 0.0},
        (value for value in (1.0, 0.0)),
    ],
)
def test_other_values_are_not_rewards(returned):
    found = read_values(returned, 2)
    message = found if isinstance(found, str) else describe_wrong(found)
    assert "expected a list of 2 numbers" in message


@pytest.mark.parametrize(
    ("value", "weight"),
    [
        (10**400, 1.0),
        pytest.param(10**5000, 1.0, id="too long to be written"),
        (Fraction(10**400), 1.0),
        (Decimal("1e400"), 1.0),
        (Decimal("sNaN"), 1.0),
        (-1.7e308, 1.0),
        (2e30, 0.1),
        (1e29, -20.0),
    ],
)
def test_a_reward_whose_sums_and_squares_overflow_is_refused_like_nan(value, weight):
    assert describe_wrong([1e30, None, -1e29], weight=weight / abs(weight)) == ""
    message = describe_wrong([value, 0], weight=weight)
    assert "beyond ±1e+30: scale or clip it" in message


@pytest.mark.parametrize("function", ["exact", "math_verify", "last_number", "format"])
def test_a_response_cut_off_in_thoughts_that_its_prompt_began_has_no_answer(function):
    responses = (r"We try \boxed{2}. Then", "So 2 </think> Answer: 2", "Answer: 2")
    with pool(function=function) as scorer:
        for number, end in enumerate(("<think>", "<think>\n", "")):
            asked = replace(prompt(number), text=f"1 + 1 = {end}")
            for index, response in enumerate(responses):
                scorer.submit(sample(asked, index, response), group_size=3)
            is_told = not end and function != "format"
            assert [score.value for score in scorer.collect(None)] == [is_told, 1.0, is_told]
            if function != "format":
                assert scorer.try_on(asked, ["Answer: 2"])[0][0].value == 1.0


def test_a_function_scores_only_its_own_sources():
    chosen = functions(
        here={"function": "reward_functions:data_sets", "sources": ["a"]},
        everywhere={"function": "length", "args": {"start_tokens": 0, "end_tokens": 4}},
    )
    with pool(functions=chosen) as scorer:
        scorer.submit(sample(prompt(0, dataset="a"), 0, "ab"), group_size=1)
        scorer.submit(sample(prompt(1, dataset="b"), 0, "ab"), group_size=2)
        first, second = scorer.collect(None)
    assert (first.value, first.parts) == (0.5, (("here", 1.0), ("everywhere", -0.5)))
    assert (second.value, second.parts) == (-0.5, (("everywhere", -0.5),))


def test_a_data_set_needs_only_the_columns_of_the_functions_that_score_it():
    chosen = functions(
        a={"function": "reward_functions:with_columns", "sources": ["a"]}, b={"function": "exact"}
    )
    with pool(functions=chosen) as asked:
        assert asked.columns_of("a") == ("difficulty",)
        assert asked.columns_of("b") == ()


def test_metrics_are_by_function_and_by_source():
    def scored_group(number, dataset, rewards, parts):
        asked = prompt(number, dataset=dataset)
        samples = tuple(sample(asked, index, "a") for index in range(2))
        group = Group(prompt=asked, samples=samples)
        return ScoredGroup(group=group, rewards=rewards, parts=parts)

    metrics = reward_metrics(
        [
            scored_group(0, "a", (1.0, 3.0), ((("f", 1.0), ("g", 2.0)), (("f", 3.0), ("g", 0.0)))),
            scored_group(1, "b", (5.0, 5.0), ((("f", 5.0),), (("f", 5.0),))),
        ]
    ).read()
    assert metrics == {
        "reward/mean": 3.5,
        "reward/std": pytest.approx(1.6583, rel=1e-4),
        "reward/f/mean": 3.5,
        "source/a/reward/f/mean": 2.0,
        "source/b/reward/f/mean": 5.0,
        "reward/g/mean": 1.0,
        "source/a/reward/g/mean": 1.0,
        "source/a/reward_mean": 2.0,
        "source/a/groups": 1,
        "source/a/no_signal_frac": 0.0,
        "source/b/reward_mean": 5.0,
        "source/b/groups": 1,
        "source/b/no_signal_frac": 1.0,
    }


FAULTS = {
    "two": (
        {},
        r"cannot be loaded: takes \(prompts, responses\), expected \(prompts, "
        r"responses, answers\) by these names, and data columns by theirs$",
    ),
    "of_trl": ({}, r"takes \(completions, .*; this is one of TRL's: its completions are"),
    "of_verl": ({}, r"takes \(data_source, solution_str, .*; this is one of verl's, for one"),
    "of_openrlhf": ({}, r"takes \(queries, prompts, labels\), expected \(prompts, responses, "),
    "rank": ({"top": 1}, "cannot be loaded: has no argument 'top'; it takes none"),
    "with_columns": ({}, "raised LookupError: .* no column 'difficulty', when called once as a"),
    "unsure": (
        {},
        r"gave no score for this response, which was the data set's own answer 'odd' \(f:1\)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_function_that_cannot_be_called_with_its_settings_is_found_before_training(name):
    args, message = FAULTS[name]
    reward = RewardConfig(function=f"reward_functions:{name}", args=args)
    answer = "odd" if name == "unsure" else "2"
    if name == "unsure":
        reward.function = "reward_functions:never_sure"
    with reward_pool(reward) as tried, pytest.raises(RewardError, match=message) as error:
        check_reward(reward, tried, [prompt(answer=answer)])
    assert str(error.value).startswith(f"reward.function={reward.function} ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"functions": functions(long={"function": "length", "args": {"tokens": 3}})},
            r"reward\.functions\.long\.function=length cannot be loaded: has no argument "
            "'tokens'; it takes start_tokens, end_tokens",
        ),
        (
            {"function": "length", "args": {"start_tokens": 3}},
            "reward.function=length cannot be loaded: needs the argument end_tokens$",
        ),
    ],
)
def test_a_wrong_or_missing_argument_of_a_built_in_function_is_named(settings, message):
    with reward_pool(RewardConfig(**settings)) as tried, pytest.raises(RewardError, match=message):
        tried.columns_of("")


def test_a_reward_that_rejects_the_data_sets_own_answer_is_named_at_the_start():
    reward = RewardConfig(function="exact")
    with reward_pool(reward) as tried:
        assert check_reward(reward, tried, [prompt(answer="34")]) == ()
        (note,) = check_reward(reward, tried, [prompt(answer="a{")])
    assert "reward.function=exact gives 0 to the data set's own answer 'a{'" in note
