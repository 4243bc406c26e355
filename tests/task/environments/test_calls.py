"""Calls with a side effect happen once, no matter which process dies in between."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
from episodes import answer, fresh, hear, pool, say, text_of
from own_process import wait_until

from april_rl.config.choices import OnRestart
from april_rl.task.environments.calls import CallError, Calls, path_of
from april_rl.types import SampleId

SAMPLE = SampleId(3, 1)


def calls_in(folder, sample_id):
    return Calls(path_of(folder, sample_id, ""))


class Tool:
    """A tool that records its requests."""

    def __init__(self, *, fails=False):
        self.asked, self.fails = [], fails

    def add(self, *numbers, call):
        self.asked.append((numbers, call.attempt))
        if self.fails:
            raise ConnectionError("gone")
        return sum(numbers)

    def add_plainly(self, *numbers):
        self.asked.append(numbers)
        return tuple(numbers)


def test_a_damaged_record_is_reported_with_its_file_and_line(tmp_path):
    """A kill may cut off the last line, but not the lines before it."""
    tool = Tool()
    calls_in(tmp_path, SAMPLE).once(tool.add, 1, 2)
    (notes,) = tmp_path.rglob("3_1.jsonl")
    first, *others = notes.read_bytes().splitlines(keepends=True)
    notes.write_bytes(b"".join([first, b'{"key": \n', *others]))
    with pytest.raises(CallError, match=r"3_1\.jsonl:2: the note of a call is damaged"):
        calls_in(tmp_path, SAMPLE)


def test_a_call_is_made_once_for_its_number_function_and_arguments(tmp_path):
    tool = Tool()
    first = calls_in(tmp_path, SAMPLE)
    assert [first.once(tool.add, 1, 2), first.once(tool.add, 1, 2)] == [3, 3]
    assert first.take_counts() == (2, 0)
    again = calls_in(tmp_path, SAMPLE)
    assert [again.once(tool.add, 1, 2), again.once(tool.add, 1, 2)] == [3, 3]
    assert again.take_counts() == (0, 0)
    assert again.once(tool.add, 1, 2) == 3
    assert len(tool.asked) == 3
    assert calls_in(tmp_path, SAMPLE).once(tool.add, 2, 2) == 4, "another history"
    assert calls_in(tmp_path, SampleId(3, 0)).once(tool.add, 1, 2) == 3, "another sample"
    assert len(tool.asked) == 5


def test_calls_keep_their_keys_in_another_folder_and_new_calls_get_other_keys(tmp_path):
    keys = []

    def note(call):
        keys.append(call)

    for folder in (tmp_path / "a", tmp_path / "b"):
        calls_in(folder, SAMPLE).once(note)
    assert keys[0].key != keys[1].key
    moved = (tmp_path / "a").rename(tmp_path / "c")
    calls_in(moved, SAMPLE).once(note)
    assert len(keys) == 2


def test_a_result_is_the_same_after_a_replay(tmp_path):
    tool = Tool()
    results = [calls_in(tmp_path, SAMPLE).once(tool.add_plainly, 1, 2) for _ in range(2)]
    assert results == [[1, 2], [1, 2]]
    assert tool.asked == [(1, 2)]


def test_a_coroutine_is_awaited_once(tmp_path):
    asked = []

    async def look_up(word):
        asked.append(word)
        return word.upper()

    for _ in range(2):
        assert asyncio.run(_await_call(calls_in(tmp_path, SAMPLE), look_up, "a")) == "A"
    assert asked == ["a"]


async def _await_call(calls, function, *args):
    return await calls.once(function, *args)


def test_a_call_that_has_not_returned_is_retried_with_the_same_key(tmp_path):
    tool = Tool(fails=True)
    with pytest.raises(ConnectionError):
        calls_in(tmp_path, SAMPLE).once(tool.add, 1)
    tool.fails = False
    calls = calls_in(tmp_path, SAMPLE)
    assert calls.once(tool.add, 1) == 1
    assert tool.asked == [((1,), 1), ((1,), 2)]
    assert calls.take_counts() == (1, 1)
    lines = [json.loads(line) for line in path_of(tmp_path, SAMPLE, "").read_text().splitlines()]
    assert [sorted(line) for line in lines] == [
        ["name"],
        ["attempt", "key"],
        ["attempt", "key"],
        ["key", "result"],
    ]
    assert len({line["key"] for line in lines[1:]}) == 1


def test_calls_keep_their_keys_when_their_order_changes(tmp_path):
    tool = Tool()
    first = calls_in(tmp_path, SAMPLE)
    assert [first.once(tool.add, n) for n in (1, 2)] == [1, 2]
    again = calls_in(tmp_path, SAMPLE)
    assert [again.once(tool.add, n) for n in (2, 1)] == [2, 1]
    assert len(tool.asked) == 2


def test_an_abandoned_episode_that_still_runs_makes_no_calls(tmp_path):
    tool = Tool()
    calls = calls_in(tmp_path, SAMPLE)
    assert calls.once(tool.add, 1) == 1
    calls.close()
    with pytest.raises(CallError, match="abandoned"):
        calls.once(tool.add, 2)
    assert len(tool.asked) == 1


def test_a_step_that_timed_out_makes_no_more_calls(tmp_path):
    letters = tmp_path / "letters"
    with pool("SlowClerk", folder=tmp_path, step_timeout_s=0.5) as environments:
        sample = hear(environments, fresh(notes=letters))
        assert text_of(answer(environments, say(sample, "a"))) == "a1"
        wait_until(lambda: "woke" in letters.read_text())
    assert letters.read_text().split("\n")[:-1] == ["first 1", "first 2", "a 1", "woke"]


def test_a_record_that_was_cut_off_does_not_count(tmp_path):
    tool = Tool()
    assert calls_in(tmp_path, SAMPLE).once(tool.add, 1) == 1
    path = path_of(tmp_path, SAMPLE, "")
    path.write_text(path.read_text()[:-5])
    assert calls_in(tmp_path, SAMPLE).once(tool.add, 1) == 1
    assert tool.asked == [((1,), 1), ((1,), 2)]
    # Lines written after the cut can be read.
    assert calls_in(tmp_path, SAMPLE).once(tool.add, 1) == 1
    assert len(tool.asked) == 2


@pytest.mark.parametrize("argument", [{1}, object()])
def test_arguments_and_results_are_data(tmp_path, argument):
    tool = Tool()
    with pytest.raises(CallError, match=r"JSON cannot encode the arguments of .*add_plainly"):
        calls_in(tmp_path, SAMPLE).once(tool.add_plainly, argument)
    with pytest.raises(CallError, match="returned a value that JSON cannot encode"):
        calls_in(tmp_path, SAMPLE).once(lambda: argument)
    assert tool.asked == []


def test_a_rebuilt_episode_sends_no_letter_twice(tmp_path):
    letters, folder = tmp_path / "letters", tmp_path / "calls"
    with pool("Clerk", folder=folder) as environments:
        sample = hear(environments, say(hear(environments, fresh(notes=letters)), "a"))
        sample = hear(environments, say(sample, "die"))
        assert text_of(sample.spans[-1]) == "die1"
        sample = hear(environments, say(sample, "dieinside"))
        assert text_of(sample.spans[-1]) == "dieinside2"
        found = {key: metric.read() for key, metric in environments.metrics().items()}
        # Samples of dead processes got no reply.
        assert (found["environment/calls"], found["environment/repeated_calls"]) == (2, 1)
    with pool("Clerk", folder=folder) as environments:
        assert text_of(answer(environments, say(sample, "b"))) == "b1"
    assert letters.read_text().splitlines() == ["a 1", "die 1", "dieinside 1", "dieinside 2", "b 1"]


def test_records_stay_until_no_checkpoint_needs_them(tmp_path):
    with pool("Clerk", folder=tmp_path, num_saves=2) as environments:
        make = partial(fresh, notes=tmp_path / "letters")
        hear(environments, say(hear(environments, make(1)), "a"))
        hear(environments, say(hear(environments, make(2)), "a"))
        environments.forget(SampleId(1, 0))
        for _ in range(2):
            environments.notes.on_save()
            assert path_of(tmp_path, SampleId(1, 0), "").exists()
        environments.notes.on_save()
        assert not path_of(tmp_path, SampleId(1, 0), "").exists()
        assert path_of(tmp_path, SampleId(2, 0), "").exists()


def test_an_evaluation_ignores_the_calls_of_an_earlier_one(tmp_path):
    letters = tmp_path / "letters"
    with pool("Clerk", folder=tmp_path) as environments:
        for _ in range(2):
            sample = say(hear(environments, fresh(-1, notes=letters)), "a")
            hear(environments, sample)
            environments.forget(sample.id)
            environments.notes.on_evaluation_end()
    assert letters.read_text().splitlines() == ["a 1", "a 1"]


def test_an_evaluation_that_was_killed_repeats_no_call(tmp_path):
    letters = tmp_path / "letters"
    for _ in range(2):
        with pool("Clerk", folder=tmp_path) as environments:
            sample = hear(environments, say(hear(environments, fresh(-1, notes=letters)), "a"))
            environments.forget(sample.id)
    assert letters.read_text().splitlines() == ["a 1"]


def test_evaluation_sets_do_not_share_calls_with_equal_numbers(tmp_path):
    first, second = (path_of(tmp_path, SampleId(-1, 0), name) for name in ("a", "b"))
    assert first != second


def test_a_call_after_one_that_raised_is_another_attempt_at_it(tmp_path):
    """It has the same key, and an episode that is rebuilt does not repeat calls that
    have returned.
    """
    keys = []

    def pay(call):
        keys.append(call)
        if call.attempt == 1:
            raise ConnectionError("gone")
        return "paid"

    for _ in range(2):
        calls = calls_in(tmp_path, SAMPLE)
        for _ in range(2):
            try:
                assert calls.once(pay) == "paid"
                break
            except ConnectionError:
                continue
    assert [call.attempt for call in keys] == [1, 2]
    assert len({call.key for call in keys}) == 1


def test_simultaneous_calls_with_the_same_arguments_are_different_calls(tmp_path):
    keys = []

    async def pay(call):
        keys.append(call.key)
        await asyncio.sleep(0.01)

    async def both():
        calls = calls_in(tmp_path, SAMPLE)
        await asyncio.gather(calls.once(pay), calls.once(pay))

    asyncio.run(both())
    assert len(set(keys)) == 2


def test_an_episode_that_restarts_episodes_repeats_its_calls_as_new_attempts(tmp_path):
    letters = tmp_path / "letters"
    settings = {"folder": tmp_path / "calls", "on_restart": OnRestart.again}
    for _ in range(2):
        with pool("Clerk", **settings) as environments:
            sample = say(hear(environments, fresh(notes=letters)), "a")
            hear(environments, say(hear(environments, sample), "b"))
            counted = environments.metrics()["environment/repeated_calls"].read()
    assert letters.read_text().splitlines() == ["a 1", "b 1", "a 2", "b 2"]
    assert counted == 2
