"""An open group: requests for its samples, their completions and scores."""

from dataclasses import replace

import pytest
from light_samples import PROMPT, completion

from april_rl.training.rollout.buffer import Buffer
from april_rl.training.rollout.codec import restore_open_group, save_open_group
from april_rl.training.rollout.open_group import _MOVES, Failure, OpenGroup, SampleState
from april_rl.types import Completion, Group, Observation, SampleId, Score


def grown(group: OpenGroup, *completions: Completion) -> OpenGroup:
    """Extend samples as if engine 0 had computed these tokens."""
    for each in completions:
        index = each.sample_id.index
        if group.states[index] is SampleState.parked:
            group.move(index, SampleState.waiting)
        group.assign(index, engine=0, expected_tokens=1.0)
        group.extend(each)
    return group


def open_group(buffer: Buffer, *num_tokens: int | None) -> OpenGroup:
    """Return a group for prompt 1 of two tokens; unfinished samples have this many tokens, finished
    ones at most as many.
    """
    group = buffer.open(PROMPT)
    for index, count in enumerate(num_tokens):
        if count is None:
            part = completion(index, start=0, num_tokens=3, version=0)
            grown(group, replace(part, finish_reason="stop"))
        elif count:
            grown(group, completion(index, start=0, num_tokens=count, version=0))
    return group


def save_and_restore(group: OpenGroup) -> OpenGroup:
    state = save_open_group(group)
    return restore_open_group(state, num_engines=1)


@pytest.mark.parametrize("now", SampleState)
@pytest.mark.parametrize("to", SampleState)
def test_a_sample_makes_only_legal_moves(now, to):
    """docs/design.md lists them, and its test compares that list with the code."""
    group = OpenGroup(PROMPT, 1)
    group.states[0] = now
    if to in _MOVES[now]:
        group.move(0, to)
        assert group.states == [to]
        return
    with pytest.raises(AssertionError, match=f"cannot go from {now.value} to {to.value}"):
        group.move(0, to)
    assert group.states == [now]


def test_a_group_is_scored_when_every_sample_has_a_score_and_not_before():
    """Fails when a repeated score counts twice, or rewards are in the order of their arrival."""
    group = open_group(Buffer(3), None, None, None)
    scores = [Score(SampleId(1, i), float(i), "scored") for i in range(3)]
    for index in (2, 2, 1):
        group.add_score(scores[index])
        assert not group.is_scored
    group.add_score(scores[0])
    assert group.is_scored
    scored = group.to_scored()
    assert scored.group == Group(prompt=PROMPT, samples=tuple(group.samples))
    assert scored.rewards == (0.0, 1.0, 2.0)


def test_a_group_with_failed_scores_has_the_first_failure_and_no_rewards():
    """Fails when a failed score is forgotten or treated as a reward."""
    group = open_group(Buffer(2), None, None)
    for index in (1, 0):
        group.add_score(Score(SampleId(1, index), None, "timeout", str(index)))
    assert group.is_scored
    assert group.failure == ((1, 1), "reward timeout", "1")
    with pytest.raises(AssertionError):
        group.to_scored()


def test_a_turn_that_the_engine_failed_gets_no_reply():
    """Fails when the environment gets an invalid turn, or the engine's failure is forgotten."""
    group = OpenGroup(replace(PROMPT, has_environment=True), 1)
    group.observe(0, Observation(()), unfinished=SampleState.waiting)
    group.assign(0, engine=0, expected_tokens=1.0)
    failed = replace(completion(0, start=0, num_tokens=2, version=3), finish_reason="nan_logprobs")
    assert group.extend(failed)
    assert group.states == [SampleState.finished]
    assert group.failure is not None
    assert group.failure.reason == "engine nan_logprobs"
    assert (group.sample(0).is_finished, group.sample(0).is_failed) == (True, True)


def test_the_open_tokens_are_the_tokens_of_open_groups():
    """Fails when the samples of an open group are left out, or a closed group is counted."""
    buffer = Buffer(3)
    buffer.open(replace(PROMPT, id=0))
    open_group(buffer, 5, None, 0)
    buffer.drop(Failure(SampleId(0, 0), "test", ""))
    assert buffer.open_tokens == 8


def test_fresh_samples_are_the_shortest_ones_with_tokens_of_this_version():
    """Among equal ones, the first is taken. Fails when a sample without tokens or with an earlier
    version is taken, or the version of a sample's first part counts as that of its last.
    """
    buffer = Buffer(6)
    group = buffer.open(PROMPT)
    for index, (num_tokens, version) in enumerate([(5, 3), (2, 2), (4, 3), (3, 3), (3, 3)]):
        grown(group, completion(index, start=0, num_tokens=num_tokens, version=version))
    assert [s.index for s in buffer.fresh_samples(3, limit=3)] == [3, 4, 2]
    assert [s.index for s in buffer.fresh_samples(3, limit=9)] == [3, 4, 2, 0]
    assert buffer.open_tokens == 17
    grown(group, completion(1, start=2, num_tokens=7, version=4))
    assert [s.index for s in buffer.fresh_samples(4, limit=9)] == [1]


def test_fresh_samples_are_ordered_by_the_length_of_prompt_and_response():
    """Fails when a longer prompt does not count, or a sample is taken from another group."""
    buffer = Buffer(2)
    for prompt_id, num_tokens in ((1, 9), (2, 1)):
        group = buffer.open(replace(PROMPT, id=prompt_id, token_ids=(5,) * num_tokens))
        for index in range(2):
            part = completion(index, start=0, num_tokens=2 + prompt_id + index, version=3)
            grown(group, replace(part, sample_id=SampleId(prompt_id, index)))
    fresh = buffer.fresh_samples(3, limit=3)
    assert [sample.id for sample in fresh] == [(2, 0), (2, 1), (1, 0)]


def test_a_failed_group_is_restored_as_failed():
    """Fails when a sample without a value is restored with one."""
    group = open_group(Buffer(2), None, None)
    failed = Score(SampleId(1, 1), None, "crash", "died")
    group.add_score(failed)
    again = save_and_restore(group)
    assert again.failure == (failed.sample_id, "reward crash", "died")
    assert again.indices(SampleState.scored) == [1]


def test_a_response_that_the_engine_failed_has_no_reward_even_after_a_restore():
    """Fails when the reward of an incomplete response counts, or a restart loses the reason."""
    buffer = Buffer(2)
    group = buffer.open(PROMPT)
    group.move_all(SampleState.waiting, to=SampleState.running)
    empty = completion(1, start=0, num_tokens=0, version=3)
    failed = replace(empty, finish_reason="nan_logprobs")
    assert group.extend(failed) is not None
    group.move_all(SampleState.running, to=SampleState.parked)
    for one in (group, save_and_restore(group)):
        one.add_score(Score(SampleId(1, 1), 1.0, "scored"))
        assert one.failure == (
            SampleId(1, 1),
            "engine nan_logprobs",
            "the engine's log-probabilities are not finite",
        )
