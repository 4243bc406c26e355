"""The pool of environments: real processes that hang, die or return invalid values."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial

import psutil
import pytest
from episodes import answer, answers, fresh, hear, pool, say, text_of
from own_process import is_running, wait_until

from april_rl.config.choices import OnRestart
from april_rl.task.environments.check import check_environment
from april_rl.task.environments.episode import EpisodeReply
from april_rl.task.environments.pool import MAX_FAILED, MAX_ORIGINS
from april_rl.task.environments.protocol import EnvironmentFailedError
from april_rl.types import Observation


def counts(environments):
    return {
        key.removeprefix("environment/"): value
        for key, metric in environments.metrics().items()
        if (value := metric.read()) and not key.endswith("_s")
    }


def test_an_episode_begins_and_continues_in_its_own_instance():
    with pool() as environments:
        first, second = (hear(environments, fresh(n, opening=str(n))) for n in (1, 2))
        assert [text_of(each.spans[0]) for each in (first, second)] == ["1", "2"]
        replies = answers(environments, say(first, "a"), say(second, "b"))
        assert [text_of(reply.observation) for reply in replies] == ["1a", "1b"]
        first = say(first, "a").with_span(replies[0].observation)
        assert text_of(answer(environments, say(first, "c"))) == "2c"
        assert replies[0].observation.reward == 0.5


def test_a_plain_tuple_of_messages_reward_and_end_is_a_step_result():
    with pool() as environments:
        observation = answer(environments, say(hear(environments, fresh()), "tuple"))
    assert (observation.is_final, observation.reward) == (True, 0.5)


def test_siblings_get_the_same_seed_and_other_prompts_another_one(tmp_path):
    notes = tmp_path / "notes"
    with pool() as environments:
        for number, index in ((1, 0), (1, 1), (2, 0)):
            hear(environments, fresh(number, index=index, notes=notes))
    first, second, third = notes.read_text().splitlines()
    assert first == second != third


def test_a_waiting_episode_does_not_delay_others():
    with pool("Meeting") as environments:
        samples = [say(hear(environments, fresh(n)), "a") for n in range(2)]
        assert all(reply.observation.is_final for reply in answers(environments, *samples))
    with pool(num_processes=2) as environments:
        slow, fast = (hear(environments, fresh(n)) for n in range(2))
        environments.act(say(slow, "sleep 600000"))
        environments.act(say(fast, "a"))
        (reply,) = environments.mailbox.collect((environments,), 60.0)
        assert reply.sample_id == fast.id


@pytest.mark.parametrize(
    ("settings", "finish_reason", "is_final"),
    [
        ({}, "stop", False),
        ({"max_turns": 1}, "stop", True),
        ({"budget": 2}, "stop", True),
        ({}, "length", True),
        ({"max_observation_tokens": 1}, "stop", True),
        ({"max_observation_tokens": 2}, "stop", False),
    ],
)
def test_an_episode_ends_with_its_budgets(settings, finish_reason, is_final):
    with pool(**settings) as environments:
        sample = say(hear(environments, fresh()), "a", finish_reason=finish_reason)
        observation = answer(environments, sample)
    assert (observation.is_final, observation.reward) == (is_final, 0.5)
    assert text_of(observation) == ("" if is_final else "1a")


def test_the_observation_budget_covers_all_replies_together():
    """Two tokens for each and five in total: the third one does not fit."""
    with pool(max_observation_tokens=5) as environments:
        sample = hear(environments, fresh())
        for _ in range(2):
            sample = hear(environments, say(sample, "a"))
            assert not sample.is_finished
        last = answer(environments, say(sample, "a"))
    assert (last.is_final, last.token_ids, last.failure) == (True, (), "")


FAILURES = {
    "raise": ({}, r"KeyError: 'no such tool' \(.*environment_classes.py:\d+\)"),
    "timeout": ({}, r"TimeoutError: of a socket"),
    "sleep 600000": ({"step_timeout_s": 0.2}, r"no answer within environment.step_timeout_s = 0.2"),
    "die": ({}, "its process ended with exit code -9"),
    "nan": ({}, "step returned reward=nan: expected a finite number"),
    "none": ({}, "step returned None, expected a StepResult"),
    "norole": ({}, r"step returned messages=\[\{'content': '1'\}\]: expected text, or a list"),
}


@pytest.mark.parametrize("turn", FAILURES)
def test_an_episode_that_fails_twice_is_given_up_with_the_reason(turn, tmp_path):
    settings, message = FAILURES[turn]
    notes = tmp_path / "notes"
    with pool(**settings) as environments:
        observation = answer(environments, say(hear(environments, fresh(notes=notes)), turn))
        assert observation.is_final
        assert observation.reward == 0
        assert re.search(message, observation.failure), observation.failure
        found = counts(environments)
        assert (found["errors"], found["retries"]) == (1, 1)
        assert found.get("timeouts", 0) == (2 if turn.startswith("sleep") else 0)
        # The turns before it were repeated in a new instance, and the other samples did not change.
        calls = [line.split()[0] for line in notes.read_text().splitlines()]
        assert calls == ["reset", turn.split()[0]] * 2
        assert text_of(hear(environments, fresh(1, opening="z")).spans[0]) == "z"


@pytest.mark.parametrize("turn", ["raiseonce", "dieonce"])
def test_a_second_attempt_rebuilds_the_episode(turn, tmp_path):
    notes = tmp_path / "notes"
    with pool() as environments:
        sample = hear(environments, say(hear(environments, fresh(notes=notes)), "a"))
        other = hear(environments, fresh(1))
        assert text_of(answer(environments, say(sample, turn))) == f"2{turn}"
        assert text_of(answer(environments, say(other, "b"))) == "1b"
    lines = [line.split()[0] for line in notes.read_text().splitlines()]
    assert lines == ["reset", "a", turn, "reset", "a", turn]


def test_a_hung_process_is_killed_and_its_other_episodes_continue_elsewhere():
    with pool(step_timeout_s=1.0, limits={"start_timeout_s": 3.0}) as environments:
        hung, other = (hear(environments, fresh(n)) for n in range(2))
        observation = answer(environments, say(hung, "block 600000"))
        assert "did not answer in time and was killed" in observation.failure
        assert text_of(answer(environments, say(other, "a"))) == "1a"
        assert counts(environments)["deaths"] == 2


def test_an_episode_that_ends_its_process_does_not_fail_others():
    with pool() as environments:
        samples = [hear(environments, fresh(n)) for n in range(6)]
        turns = [say(s, "die" if n == 2 else "sleep 300") for n, s in enumerate(samples)]
        replies = answers(environments, *turns)
        failed = [r.sample_id.prompt_id for r in replies if r.observation.failure]
        assert failed == [2]
        assert len(replies) == 6
        assert counts(environments)["deaths"] == 3


def test_turns_that_end_their_processes_do_not_end_the_run():
    """Also when no other episode gets a reply, and some come while others are in quarantine."""
    with pool() as environments:
        samples = [say(hear(environments, fresh(n)), "die") for n in range(4)]
        for sample in samples[:2]:
            environments.act(sample)
        while not counts(environments).get("deaths"):
            assert not environments.mailbox.collect((environments,), 0.05)
        replies = answers(environments, *samples[2:])
        failures = [reply.observation.failure.partition(": ")[2] for reply in replies]
        assert failures == [FAILURES["die"][1]] * 4
        assert counts(environments)["deaths"] > 2 * MAX_ORIGINS


def test_processes_that_end_as_episodes_begin_end_the_run():
    """Fails when nothing ends a run whose environment cannot work any more, or a single row that
    ends its processes does.
    """
    with pool() as environments:
        same_row = [fresh(0, index=n, opening="die") for n in range(4)]
        assert all(reply.observation.failure for reply in answers(environments, *same_row))
        for number in range(1, MAX_ORIGINS):
            assert answer(environments, fresh(number, opening="die")).failure
        with pytest.raises(EnvironmentFailedError, match=r"keep ending, the last one .* code -9"):
            answer(environments, fresh(MAX_ORIGINS, opening="die"))


def test_processes_that_end_after_a_turn_do_not_end_the_run():
    """Other episodes that begin meanwhile, each alone in its process, are not at fault."""
    with pool(num_processes=MAX_ORIGINS + 1, step_timeout_s=600.0) as environments:
        pids = [
            int(text_of(answer(environments, say(hear(environments, fresh(n)), "pid"))))
            for n in range(MAX_ORIGINS + 1)
        ]
        assert len(set(pids)) == MAX_ORIGINS + 1
        for number in range(MAX_ORIGINS + 1):
            environments.act(fresh(10 + number, opening="wait"))
        time.sleep(0.5)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while counts(environments).get("deaths", 0) <= MAX_ORIGINS:
            assert not environments.mailbox.collect((environments,), 0.05)


def test_a_turn_that_writes_into_its_pipe_fails_alone_and_at_once():
    with pool() as environments:
        samples = [hear(environments, fresh(n)) for n in range(2)]
        assert "exit code" in answer(environments, say(samples[0], "write")).failure
        assert text_of(answer(environments, say(samples[1], "a"))) == "1a"


def test_a_process_that_user_code_has_forked_replies_once():
    """Fails when the child replies too, or becomes a second process of episodes."""
    with pool() as environments:
        sample = hear(environments, fresh())
        pid = int(text_of(answer(environments, say(sample, "pid"))))
        assert text_of(answer(environments, say(hear(environments, fresh(1)), "fork"))) == "1"
        [child] = psutil.Process(pid).children()
        wait_until(lambda: not is_running(child.pid))
        assert text_of(answer(environments, say(hear(environments, fresh(2)), "a"))) == "1a"


@pytest.mark.parametrize("reply", [EpisodeReply(number=0, outcome="error"), "text", [1]])
def test_a_process_that_answers_questions_it_was_not_asked_is_ended(reply):
    """Fails when the controller raises. Question 0 is answered already; so is a number that is
    open in another process.
    """
    with pool() as environments:
        sample, other = hear(environments, fresh()), hear(environments, fresh(1))
        [process] = environments._processes
        environments.act(say(other, "sleep 300"))
        environments.mailbox.put(partial(process._on_reply, process, reply))
        [found] = environments.mailbox.collect((environments,), None)
        assert text_of(found.observation) == "1sleep 300", "in another process, after this one"
        assert not psutil.pid_exists(process._process.pid)
        assert text_of(answer(environments, say(sample, "a"))) == "1a"


def test_a_process_that_a_turn_has_spoilt_is_replaced():
    with pool() as environments:
        answer(environments, say(hear(environments, fresh()), "spoil"))
        failures = [answer(environments, fresh(n)).failure for n in range(1, MAX_FAILED)]
        assert failures[0]
        assert not failures[-1]


def test_programs_of_a_process_that_dies_end_with_it():
    with pool() as environments:
        sample = hear(environments, say(hear(environments, fresh()), "start"))
        program = int(text_of(sample.spans[-1]))
        assert answer(environments, say(sample, "die")).failure
        wait_until(lambda: not is_running(program))


def test_a_process_that_does_not_read_does_not_delay_others():
    with pool(step_timeout_s=1.0, limits={"start_timeout_s": 3.0}) as environments:
        samples = [hear(environments, fresh(n)) for n in range(30)]
        environments.act(say(samples[0], "block 600000"))
        for sample in samples[1:]:
            environments.act(say(sample, "a" * 20_000))
        replies = environments.mailbox.collect((environments,), None)
        failed = [r.sample_id.prompt_id for r in replies if r.observation.failure]
        assert (len(replies), failed) == (30, [0])


def test_an_episode_continues_in_a_new_pool_as_after_a_resume(tmp_path):
    notes = tmp_path / "notes"
    with pool() as environments:
        sample = hear(environments, say(hear(environments, fresh(notes=notes)), "a"))
    with pool() as environments:
        assert text_of(answer(environments, say(sample, "b"))) == "2b"
        assert counts(environments) == {"replays": 1}
    assert [line.split()[0] for line in notes.read_text().splitlines()] == [
        *("reset", "a"),
        *("reset", "a", "b"),
    ]


def test_an_episode_that_cannot_be_repeated_fails():
    with pool("Forgetful") as environments:
        sample = hear(environments, say(hear(environments, fresh()), "a"))
        failure = answer(environments, say(sample, "die")).failure
        assert "ended with exit code -9" in failure
    with pool("Forgetful") as environments:
        failure = answer(environments, say(sample, "a")).failure
        assert "it returned something else when it was built again, after turn 1" in failure
        assert "environment.on_restart=again" in failure


def test_with_on_restart_again_no_episode_is_rebuilt(tmp_path):
    notes = tmp_path / "notes"
    with pool(on_restart=OnRestart.again) as environments:
        first, other = hear(environments, fresh(notes=notes)), hear(environments, fresh(1))
        assert "ended with exit code -9" in answer(environments, say(first, "die")).failure
        assert "its process has ended" in answer(environments, say(other, "a")).failure
        assert text_of(answer(environments, fresh(2, opening="z"))) == "z"
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["reset", "die"]


def test_an_opening_message_that_does_not_fit_fails():
    with pool(max_observation_tokens=3) as environments:
        failure = answer(environments, fresh(opening="1234")).failure
    assert "its first messages have 4 tokens, more than environment.max_observation" in failure


def test_programs_that_an_environment_starts_end_with_it():
    with pool() as environments:
        observation = answer(environments, say(hear(environments, fresh()), "start"))
        program = int(text_of(observation))
        assert is_running(program)
    wait_until(lambda: not is_running(program))


def test_a_finished_episode_is_forgotten():
    with pool() as environments:
        sample = say(hear(environments, fresh()), "end 2")
        assert answer(environments, sample) == Observation((), True, 2.0)
        assert environments._process_of == {}
        hear(environments, fresh(1))
        environments.forget(fresh(1).id)
        assert environments._process_of == {}


LOADING = {
    "WithoutStep": "lacks the methods of an environment: `reset` and `step`",
    "NeedsArgument": "needs the argument size,",
    "Missing": "has no function 'Missing'",
}


@pytest.mark.parametrize("name", LOADING)
def test_a_class_that_cannot_be_used_ends_the_run_before_it_starts(name):
    with pool(name) as environments, pytest.raises(EnvironmentFailedError, match=LOADING[name]):
        check_environment(environments, [fresh().prompt])


def test_an_environment_is_tried_before_the_run():
    with pool() as environments:
        check_environment(environments, [fresh(notes="a").prompt])
        assert counts(environments) == {}
        with pytest.raises(
            EnvironmentFailedError, match=r"KeyError.* when `step` was called as a test \(f:1\)"
        ):
            check_environment(environments, [fresh(notes="raise").prompt])
