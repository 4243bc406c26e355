"""Rewards that are objects: constructed once in each process, with a state that a run saves."""

from __future__ import annotations

import re
from concurrent.futures import wait

import pytest
from reward_pools import reward_pool
from source_tree import ROOT
from test_rewards_functions import prompt, sample

from april_rl.config.task import RewardConfig, RewardFunctionConfig
from april_rl.task.rewards.check import check_reward
from april_rl.task.rewards.jobs import RewardError

COUNTER = "reward_functions:Counter"


def pool(function=COUNTER, *, args=None, num_processes=1, folder=None, states=None):
    reward = RewardConfig(
        function=function, args=args or {}, num_processes=num_processes, hard_timeout_s=20.0
    )
    return reward_pool(reward, folder=folder, states=states)


def value(scorer, response, *, answer="2"):
    scorer.submit(sample(prompt(answer=answer), 0, response), group_size=1)
    (score,) = scorer.collect(None)
    return score.value


def test_an_object_is_constructed_once_with_its_arguments_and_knows_the_run_directory(tmp_path):
    with pool(args={"step": 10}, folder=tmp_path) as scorer:
        assert [value(scorer, "a") for _ in range(3)] == [10.0, 20.0, 30.0]
    assert (tmp_path / "loaded").read_text().count("\n") == 1


def test_a_new_pool_continues_from_the_saved_state():
    with pool() as scorer:
        assert scorer.save() == {}
        assert [value(scorer, "a") for _ in range(2)] == [1.0, 2.0]
        states = scorer.save()
    with pool(states=states) as scorer:
        assert value(scorer, "a") == 3.0
    with pool("reward_functions:exact", states=states) as scorer:
        assert value(scorer, "2") == 1.0


def test_a_process_that_replaces_a_dead_one_continues_from_the_last_state():
    """Fails when the process gets the state with which the pool was built."""
    with pool() as scorer:
        assert [value(scorer, "a") for _ in range(2)] == [1.0, 2.0]
        assert value(scorer, "exit") is None
        assert value(scorer, "a") == 3.0


def test_the_state_of_a_partly_scored_group_is_not_saved():
    """A resumed run scores such a group again and must not count it twice."""
    reward = RewardConfig(
        functions={
            "told": RewardFunctionConfig(function="exact"),
            "count": RewardFunctionConfig(function=COUNTER),
        },
        num_processes=1,
    )
    with reward_pool(reward) as scorer:
        scorer.submit(sample(prompt(), 0, r"\boxed{2}"), group_size=1)
        (alone, together) = scorer._pending.values()
        wait([alone.future, together.future])
        events = scorer.mailbox._events
        first, second = sorted((events.get(), events.get()), key=lambda event: event.args[0])
        scorer.mailbox.put(second)  # as after a retry
        assert scorer.collect(0) == []
        assert scorer.save() == {}
        scorer.mailbox.put(first)
        assert [score.value for score in scorer.collect(None)] == [2.0]
        assert scorer.save() == {"count": '{"num_calls": 1}'}


FAULTS = {
    "Counter": (2, r"cannot be loaded: .* set reward\.num_processes=1, it is 2"),
    "SavesOnly": (1, "cannot be loaded: has one of save and restore"),
    "SavesASet": (1, "cannot be loaded: TypeError: Object of type set is not JSON serializable"),
    "SavesASetLater": (1, "has no state that can be saved: .*set is not JSON serializable"),
    "NotCallable": (
        1,
        "cannot be loaded: has no method __call__\\(self, prompts, responses, answers\\)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_object_ends_the_run_with_one_message(name):
    num_processes, message = FAULTS[name]
    with (
        pool(f"reward_functions:{name}", num_processes=num_processes) as scorer,
        pytest.raises(RewardError, match=message) as error,
    ):
        value(scorer, "a")
    assert str(error.value).startswith(f"reward.function=reward_functions:{name} ")


def test_an_argument_that_the_class_does_not_accept_is_named():
    with (
        pool(args={"stride": 1}) as scorer,
        pytest.raises(RewardError, match="has no argument 'stride'; it takes step"),
    ):
        value(scorer, "a")


def test_the_example_of_the_page_remembers_and_continues(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(# my_rewards\.py\nclass .*?)```", page, re.DOTALL)
    (tmp_path / "page_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"function": "page_rewards:RightAndShort", "args": {"penalty": 0.5}}
    with pool(**settings, folder=tmp_path) as scorer:
        assert [value(scorer, "2"), value(scorer, "2     ")] == [1.0, 0.5]
        states = scorer.save()
    assert states == {"page_rewards:RightAndShort": "[2, 3.5]"}
    with pool(**settings, states=states) as scorer:
        assert [value(scorer, "333"), value(scorer, "4444")] == [0.0, -0.5]


def test_each_process_loads_once_for_columns_trial_and_scores(tmp_path):
    reward = RewardConfig(function="reward_functions:LoadedAnywhere", num_processes=2)
    with reward_pool(reward, folder=tmp_path) as scorer:
        assert scorer.columns_of("") == ("difficulty",)
        assert check_reward(reward, scorer, [prompt(difficulty=1)]) == ()
        for number in range(8):
            scorer.submit(sample(prompt(number, difficulty=1), 0, "a"), group_size=1)
        assert len(scorer.collect(None)) == 8
    pids = (tmp_path / "loaded").read_text().split()
    assert 1 <= len(pids) == len(set(pids)) <= 2


def test_a_trial_does_not_change_the_state():
    with pool() as scorer:
        reward = RewardConfig(function=COUNTER, num_processes=1)
        assert check_reward(reward, scorer, [prompt(), prompt(1)]) == ()
        assert scorer.save() == {}
        assert value(scorer, "a") == 1.0
