"""Tests of rows are tried on programs that do nothing before training uses them."""

from __future__ import annotations

import pytest
from reward_pools import reward_pool

from april_rl.config import TrainConfig
from april_rl.config.task import RewardConfig, RewardFunctionConfig
from april_rl.start.assembly.inputs import try_rewards
from april_rl.task.rewards.check import check_tests
from april_rl.task.rewards.jobs import RewardError
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
    with reward_pool(reward) as pool:
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


CASE = "import unittest\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n        "
CANNOT_FAIL = (
    "assert (add(1, 2) == 3, 'sum')",
    ["from solution import add\nassert (add(1, 2) == 3, 'sum')"],
    f"{CASE}self.assertTrue(add(1, 2), 3)",
    f"{CASE}self.assertFalse(Solution().add(1, 2), 3)",
    "try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    print('wrong')",
    "def test_it():\n    try:\n        assert Solution().add(1, 2) == 3\n    except:\n        pass",
    "def check(f):\n    try:\n        assert f(1) == 3\n    except AssertionError:\n"
    "        return False\ncheck(add)",
)
CAN_FAIL = (
    "assert add(1, 2) == 3",
    "assert add(1, 2) != 4",
    "assert is_even(2)",
    "assert not is_even(3)",
    "assert add(1, 2) is not None",
    "from solution import *\nassert add(1, 2) in (3, 4)",
    f"{CASE}self.assertTrue(is_even(2), 'even')",
    f"{CASE}self.assertTrue(add(1, 2) == 3, 3)",
    f"{CASE}self.assertNotEqual(add(1, 2), 4)",
    f"{CASE}with self.assertRaises(ValueError):\n            add(1, 'a')",
    [{"input": [1, 2], "output": 3, "fn_name": "add"}],
)


def test_tests_that_no_program_with_the_function_fails_are_refused() -> None:
    reward = RewardConfig(function="code", args={"sandbox": "none"}, num_processes=2)
    with reward_pool(reward) as pool:
        check_tests(pool, rows_of(*CAN_FAIL))
        for tests in CANNOT_FAIL:
            with pytest.raises(RewardError, match=r"passes the test .*, so it is not a test"):
                check_tests(pool, rows_of(tests))


def test_tests_for_another_reward_function_are_not_tried() -> None:
    functions = {
        "tests": RewardFunctionConfig(function="code", sources=["x"], args={"sandbox": "none"}),
        "right": RewardFunctionConfig(function="exact"),
    }
    with reward_pool(RewardConfig(functions=functions)) as pool:
        check_tests(pool, rows_of("no tests"))
