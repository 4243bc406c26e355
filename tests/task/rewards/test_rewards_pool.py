"""The reward pool: real processes that hang, die, use too much memory or return wrong values."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from light_samples import whole_sample
from own_process import in_own_process, is_running, wait_until
from reward_pools import reward_pool
from source_tree import TESTS

from april_rl.config.choices import Extract
from april_rl.config.task import RewardConfig
from april_rl.task.rewards.check import check_reward, gold_response
from april_rl.task.rewards.jobs import RewardError
from april_rl.types import Prompt

TOLD = "reward_functions:told"


def sample(number, response, answer="2"):
    prompt = Prompt(id=number, token_ids=(1,), text="1 + 1 = ", answer=answer, source="f:1")
    return whole_sample(prompt, 0, tuple(map(ord, response)))


def pool(function=TOLD, *, limits=None, **changes):
    """Yield a pool whose time limit is far above what a busy machine needs; tests of the limit set
    their own.
    """
    settings = {"hard_timeout_s": 20.0} | changes
    reward = RewardConfig(function=function, **settings)
    return reward_pool(reward, limits=limits)


def check(function, *, limits=None, **changes):
    settings = {"hard_timeout_s": 5.0} | changes
    reward = RewardConfig(function=function, **settings)
    with reward_pool(reward, limits=limits) as tried:
        check_reward(reward, tried, [sample(0, "").prompt])
        (scores,) = tried.try_on(sample(0, "").prompt, [gold_response("2", reward.extract)])
        return scores[0].value


def outcomes(scores):
    return [(score.sample_id.prompt_id, score.outcome) for score in scores]


def told_pid(scorer, path):
    scorer.submit(sample(0, "tell pid", str(path)), group_size=1)
    scorer.collect(None)
    return int(path.read_text())


def test_math_verify_scores_all_responses_and_reports_soft_timeouts():
    with pool("math_verify", hard_timeout_s=5.0) as scorer:
        for number, response in enumerate((r"\boxed{2}", r"\boxed{10^{10^8}}", r"\boxed{3}")):
            scorer.submit(sample(number, response), group_size=1)
        scores = scorer.collect(None)
        assert outcomes(scores) == [(0, "scored"), (1, "soft_timeout"), (2, "scored")]
        assert [score.value for score in scores] == [1.0, 0.0, 0.0]
        metrics = scorer.metrics().read()
        assert metrics["reward/soft_timeouts"] == 1
        assert metrics["reward/errors"] == 0
        assert scorer.metrics().read()["reward/soft_timeouts"] == 0


@pytest.mark.parametrize(
    ("extract", "values"), [(Extract.answer_line, [1, 0]), (Extract.boxed, [0, 1])]
)
def test_the_reward_processes_extract_the_answer_as_set(extract, values):
    with pool("math_verify", num_processes=1, extract=extract) as scorer:
        scorer.submit(sample(0, "Answer: 2"), group_size=1)
        scorer.submit(sample(1, r"\boxed{2}"), group_size=1)
        assert [score.value for score in scorer.collect(None)] == values
    assert check("math_verify", extract=extract) == 1.0


@pytest.mark.parametrize(
    ("order", "outcome"),
    [
        ("hang", "timeout"),
        ("exit", "crash"),
        ("die", "crash"),
        ("kill its group", "crash"),
        ("kill a program's group", "crash"),
        ("hunger", "crash"),
        ("raise", "crash"),
    ],
)
def test_a_failed_reward_is_retried_then_reported_without_failing_others(order, outcome):
    with pool(hard_timeout_s=1.2 if order == "hang" else 20.0) as scorer:
        for number, response in enumerate(("fine", order, "fine", "fine")):
            scorer.submit(sample(number, response), group_size=1)
        scores = scorer.collect(None)
        others = [(n, "scored") for n in (0, 2, 3)]
        assert outcomes(scores) == sorted([(1, outcome), *others])
        assert scores[1].value is None
        metrics = scorer.metrics().read()
        assert metrics["reward/errors"] == metrics["reward/retries"] == 1
        assert metrics["reward/timeouts"] == (outcome == "timeout")


def test_a_failure_that_does_not_repeat_loses_nothing(tmp_path):
    with pool() as scorer:
        scorer.submit(sample(0, "first time exit", str(tmp_path / "a")), group_size=1)
        scorer.submit(sample(1, "first time raise", str(tmp_path / "b")), group_size=1)
        assert outcomes(scorer.collect(None)) == [(0, "scored"), (1, "scored")]
        metrics = scorer.metrics().read()
        assert metrics["reward/errors"] == 0
        # If pebble reports one death as the death of all processes, no sample loses an attempt.
        assert metrics["reward/retries"] <= 2


@pytest.mark.slow
# A thread of pebble's ends, too, when it reads what is not a message.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_response_that_ends_all_processes_fails_alone(num_processes):
    """However many there are. Fails when units that ran beside it lose attempts, too, or when the
    run ends after some breaks without a score.
    """
    # Each break ends the fork server, too. The next ones need not load math-verify, as they would
    # once a pool of this process has used it.
    multiprocessing.get_context("forkserver").set_forkserver_preload([])
    orders = ["break all pipes"] * 3 + ["fine"] * 3
    with pool(num_processes=num_processes) as scorer:
        for number, response in enumerate(orders):
            scorer.submit(sample(number, response), group_size=1)
        found = outcomes(scorer.collect(None))
        assert found == [(n, "scored" if n > 2 else "crash") for n in range(6)]
        assert scorer.metrics().read()["reward/retries"] <= 4


def test_what_was_raised_can_be_written():
    with pool(num_processes=1) as scorer:
        scorer.submit(sample(0, "raise half a pair"), group_size=1)
        (score,) = scorer.collect(None)
    assert r"unreadable \ud800" in score.message


def test_the_last_failure_says_what_was_raised_and_where():
    with pool() as scorer:
        scorer.submit(sample(4, "raise"), group_size=1)
        scorer.collect(None)
        assert "ValueError: unreadable response" in scorer.last_failure
        assert "reward_functions.py:" in scorer.last_failure


@pytest.mark.parametrize(("memory_gib", "outcome"), [(1.0, "crash"), (4.0, "scored")])
def test_a_reward_process_gets_exactly_its_memory_limit(memory_gib, outcome):
    """The response needs 2 GiB. Fails when the limit is a constant, or not set."""
    with pool(num_processes=1, limits={"memory_gib": memory_gib}) as scorer:
        scorer.submit(sample(0, "reserve 2 GiB"), group_size=1)
        assert outcomes(scorer.collect(None)) == [(0, outcome)]
        assert ("memory_gib of its process is 1" in scorer.last_failure) == (outcome == "crash")


def test_a_slow_reward_does_not_delay_others(tmp_path):
    """Fails when `collect(0)` waits, or a score waits for one that was submitted earlier."""
    go = tmp_path / "go"
    with pool() as scorer:
        scorer.submit(sample(0, "fine"), group_size=1)
        scorer.collect(None)
        scorer.submit(sample(1, "wait", str(go)), group_size=1)
        scorer.submit(sample(2, "fine"), group_size=1)
        assert outcomes(scorer.collect(60.0)) == [(2, "scored")]
        assert scorer.collect(0) == []
        assert scorer.collect(0.05) == []
        go.touch()
        assert outcomes(scorer.collect(60.0)) == [(1, "scored")]
        assert scorer.collect(None) == []


def test_waiting_for_all_returns_scores_in_the_order_of_submission():
    with pool() as scorer:
        for number in range(4):
            scorer.submit(sample(number, "sleep" if number % 3 == 0 else "fine"), group_size=1)
        assert outcomes(scorer.collect(None)) == [(number, "scored") for number in range(4)]


def test_a_single_function_may_return_an_array_and_has_no_parts():
    with pool("reward_functions:exact") as scorer:
        scorer.submit(sample(0, "2"), group_size=1)
        scorer.submit(sample(1, "3"), group_size=1)
        scores = scorer.collect(None)
    assert [(score.value, score.parts) for score in scores] == [(1.0, ()), (0.0, ())]


def test_nan_costs_its_group_and_is_never_a_reward():
    """A response causes it, as with `float(response)`. Fails when it ends the run, when it is not
    tried again, or when the other groups lose their scores.
    """
    with pool() as scorer:
        for number, order in enumerate(("fine", "nan", "inf", "1e31", "fine")):
            scorer.submit(sample(number, order), group_size=1)
        found = scorer.collect(None)
        assert outcomes(found) == [(n, "scored" if n in {0, 4} else "crash") for n in range(5)]
        assert [score.value is None for score in found] == [False, True, True, True, False]
        assert re.search(r"reward\.function=.*told returned \S+ as a reward", scorer.last_failure)
        metrics = scorer.metrics().read()
    assert [metrics[f"reward/{key}"] for key in ("errors", "crashes", "retries")] == [3, 3, 3]


def test_processes_that_vanish_while_idle_are_replaced(tmp_path):
    with pool(num_processes=1) as scorer:
        for _ in range(2):
            os.kill(told_pid(scorer, tmp_path / "pid"), signal.SIGKILL)
            scorer.submit(sample(1, "fine"), group_size=1)
            assert outcomes(scorer.collect(None)) == [(1, "scored")]


@pytest.mark.slow
def test_a_process_that_stops_answering_is_replaced(tmp_path):
    with pool(num_processes=1, hard_timeout_s=1.2, limits={"start_timeout_s": 8.0}) as scorer:
        os.kill(told_pid(scorer, tmp_path / "pid"), signal.SIGSTOP)
        scorer.submit(sample(1, "fine"), group_size=1)
        assert outcomes(scorer.collect(None)) == [(1, "scored")]


def test_closing_ends_every_process_with_work_still_queued(tmp_path):
    path = tmp_path / "pid"
    with pool(num_processes=1, hard_timeout_s=100.0) as scorer:
        scorer.submit(sample(0, "tell pid and hang", str(path)), group_size=1)
        for number in range(200):
            scorer.submit(sample(number, "x" * 10_000), group_size=1)
        wait_until(lambda: path.exists() and path.read_text())
    assert not is_running(int(path.read_text()))


@pytest.mark.parametrize("forked", ["pass", "os.fork() or time.sleep(60)"])
def test_a_killed_controller_takes_its_reward_processes_along(tmp_path, forked):
    """Even when a process that it forked, as for reading data, stays alive."""
    path, go = tmp_path / "pid", tmp_path / "go"
    program = (
        "import os, pathlib, time, test_rewards_pool as t\n"
        "with t.pool(hard_timeout_s=100.0) as p:\n"
        f"    p.submit(t.sample(0, 'tell pid and hang', {str(path)!r}), group_size=1)\n"
        f"    t.wait_until(pathlib.Path({str(path)!r}).exists)\n    {forked}\n"
        f"    pathlib.Path({str(go)!r}).touch()\n    p.collect(None)\n"
    )
    command, env = [sys.executable, "-c", program], os.environ | {"PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, cwd=Path(__file__).parent, env=env) as controller:
        wait_until(lambda: go.exists() and path.read_text())
        controller.kill()
    wait_until(lambda: not is_running(int(path.read_text())))


BAD_FUNCTIONS = {
    "no_such_module:reward": "cannot be loaded: there is no module no_such",
    "reward_functions:gone": "cannot be loaded: .*has no function 'gone'",
    "reward_functions:not_a_function": "cannot be loaded: .*is not a function: it is of type ",
    "reward_functions:raises": r"raised KeyError.*reward_functions\.py:\d+\), when called once",
    "reward_functions:returns_nan": "returned nan as a reward",
    "reward_functions:returns_text": "returned '1.0' as a reward",
    "reward_functions:returns_nothing": "returned None, expected a list of 2 numbers",
    "reward_functions:returns_one_for_all": "returned 1 rewards for 2 responses",
}


@pytest.mark.parametrize("function", BAD_FUNCTIONS)
def test_a_faulty_function_gives_one_message_before_training(function):
    with pytest.raises(RewardError, match=BAD_FUNCTIONS[function]) as error:
        check(function)
    assert str(error.value).startswith(f"reward.function={function} ")
    assert "\n" not in str(error.value)
    assert function.partition(":")[0] not in sys.modules


def test_a_module_with_a_syntax_error_names_file_and_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unfinished_rewards.py").write_text("x = 1\ndef reward(:\n")
    with pytest.raises(RewardError, match=r"SyntaxError.*unfinished_rewards\.py:2\)"):
        check("unfinished_rewards:reward")


@pytest.mark.parametrize(
    ("function", "value"), [("math_verify", 1.0), ("reward_functions:exact", 0.0)]
)
def test_a_good_function_passes_the_check_with_its_own_value(function, value):
    """The example answer is in a box, not a bare answer. Fails when the function is not called."""
    assert check(function) == value


def test_a_function_that_never_answers_fails_the_check():
    message = "did not answer within 7 s, including user_code.start_timeout_s=3 for its start$"
    with pytest.raises(RewardError, match=message):
        check("reward_functions:hangs", hard_timeout_s=2.0, limits={"start_timeout_s": 3.0})


@pytest.fixture
def slow_to_load(tmp_path, monkeypatch) -> str:
    """Return a reward function whose module takes three seconds to import, like a large model."""
    monkeypatch.syspath_prepend(tmp_path)
    source = "import time\ntime.sleep(3)\ndef reward(*lists):\n    return [0.25]\n"
    (tmp_path / "slow_rewards.py").write_text(source)
    return "slow_rewards:reward"


def test_a_function_that_takes_too_long_to_load_fails_the_check(slow_to_load):
    with pytest.raises(RewardError, match=r"including user_code\.start_timeout_s=1 for its start$"):
        check(slow_to_load, limits={"start_timeout_s": 1.0})


@pytest.mark.slow
def test_start_timeout_s_lets_a_slow_function_load(slow_to_load):
    settings = {"num_processes": 1, "hard_timeout_s": 1.2}
    with pool(slow_to_load, **settings, limits={"start_timeout_s": 30.0}) as scorer:
        scorer.submit(sample(1, "fine"), group_size=1)
        assert scorer.collect(None)[0].value == 0.25
    with pool(slow_to_load, **settings, limits={"start_timeout_s": 0.3}) as scorer:
        scorer.submit(sample(1, "fine"), group_size=1)
        with pytest.raises(RewardError, match=r"user_code\.start_timeout_s=0\.3 for the start"):
            scorer.collect(None)


VARIABLES = ("HF_TOKEN", "JUDGE_KEY", "TOOL_KEY", "PLACE")


@pytest.mark.slow
def test_secrets_of_the_machine_reach_a_reward_only_through_a_setting(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "1234")
    prompt = Prompt(id=0, token_ids=(1,), text="", answer="", source="f:1")
    assert in_own_process(_known_variables, prompt) == [0.0, 1.0, 1.0, 1.0]


def _known_variables(prompt):
    limits = {"secrets": ["TOOL_KEY"]}
    with pool("reward_functions:knows", args={"api_key_env": "JUDGE_KEY"}, limits=limits) as scorer:
        return [score.value for (score,) in scorer.try_on(prompt, VARIABLES)]
