"""Tests of rows are tried on programs that do nothing before training uses them."""

from __future__ import annotations

from contextlib import closing

import pytest
from character_decoder import characters

from april_rl.assembly.rewards import try_rewards
from april_rl.config import TrainConfig
from april_rl.config.task import RewardConfig, RewardFunctionConfig
from april_rl.rewards.check import check_tests
from april_rl.rewards.jobs import RewardError
from april_rl.rewards.pool import RewardPool
from april_rl.types import Prompt


def rows_of(*tests: object) -> list[Prompt]:
    return [
        Prompt(
            id=number,
            token_ids=(1,),
            text="",
            answer="1",
            source=f"tasks.jsonl:{number + 1}",
            columns={"tests": of_row},
        )
        for number, of_row in enumerate(tests)
    ]


def test_rows_whose_tests_check_nothing_are_named_with_the_reason() -> None:
    reward = RewardConfig(function="code", args={"sandbox": "none"}, num_processes=2)
    good, weak = "assert double(2) == 4", "assert double(2) == 4\nassert 1"
    with closing(RewardPool(reward, decode=characters)) as pool:
        check_tests(pool, rows_of(good, [{"input": "2", "output": "4"}], good))
        with pytest.raises(RewardError) as error:
            check_tests(pool, rows_of(good, weak, good, {"a": 1}))
        said = str(error.value)
        check_tests(pool, rows_of(good, weak), most=1)
        config = TrainConfig(reward=reward)
        try_rewards(config, pool, [rows_of(good)], tell=str)
        for sets, held_out in (([rows_of(weak)], []), ([rows_of(good)], [rows_of(good, weak)])):
            with pytest.raises(RewardError, match=r"tasks\.jsonl:.: .*'assert 1', so"):
                try_rewards(config, pool, sets, held_out=held_out, tell=str)
    assert said.startswith("2 of 4 rows have tests")
    assert "tasks.jsonl:2: reward.function=code raised ValueError: the program 'pass' pa" in said
    assert "tasks.jsonl:4: reward.function=code raised ValueError: the tests of a task mu" in said


def test_tests_for_another_reward_function_are_not_tried() -> None:
    functions = {
        "tests": RewardFunctionConfig(function="code", sources=["x"], args={"sandbox": "none"}),
        "right": RewardFunctionConfig(function="exact"),
    }
    with closing(RewardPool(RewardConfig(functions=functions), decode=characters)) as pool:
        check_tests(pool, rows_of("no tests"))
