"""A group in the making: the requests for its samples, what comes back of them, its scores."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from light_samples import PROMPT, completion

from april_rl.rollout.buffer import Buffer
from april_rl.rollout.open_group import OpenGroup
from april_rl.rollout.requests import Requests
from april_rl.rollout.returned import awaited
from april_rl.rollout.sample_table import view
from april_rl.rollout.seeds import request_seed
from april_rl.ticks import Completions
from april_rl.types import Completion, Group, SampleId, Score


def grown(buffer: Buffer, *completions: Completion) -> None:
    """Have samples grow as if these had been awaited, each by its version."""
    for each in completions:
        came = Completions([each])
        rows = buffer.rows_of(came.columns.prompt_id, came.columns.index)
        view(buffer.table.work)[rows] = 1.0
        returned = awaited(came, rows, buffer.table, policy_version=0)
        view(buffer.table.work)[rows] = 0.0
        buffer.extend(returned, policy_version=each.policy_version)


def open_group(buffer: Buffer, *num_tokens: int | None) -> OpenGroup:
    """Prompt 1 of two tokens; samples unfinished with so many tokens, finished with none more."""
    group = buffer.open(PROMPT)
    for index, count in enumerate(num_tokens):
        if count is None:
            part = completion(index, start=0, num_tokens=3, version=0)
            grown(buffer, replace(part, finish_reason="stop"))
        elif count:
            grown(buffer, completion(index, start=0, num_tokens=count, version=0))
    return group


@given(st.integers(1, 5), st.lists(st.integers(1, 9), max_size=3))
def test_columns_are_the_requests_of_their_samples(count, lengths):
    """Fails when a sample goes on elsewhere than where it ends, gets another budget, or the seed of
    another sample or part.
    """
    parts = [tuple((n,) * n for n in lengths[: index % 4]) for index in range(count)]
    prompts = [(1, 2, 3)[: 1 + index % 3] for index in range(count)]
    columns = Requests(40, 11, [*range(7, 7 + count)], [*range(count)], prompts, parts)
    requests = columns.each()
    assert [request.sample_id for request in requests] == [(7 + i, i) for i in range(count)]
    for index, request in enumerate(requests):
        assert request.token_ids == [*prompts[index], *chain.from_iterable(parts[index])]
        assert request.start + request.max_tokens == 40
        assert request.num_tokens == len(request.token_ids)
        assert request.seed == request_seed(11, request.sample_id, len(parts[index]))


def test_a_group_is_scored_when_every_sample_has_a_score_and_none_before():
    """Fails when a score that comes twice counts twice, a failed one is forgotten, or rewards are
    in the order of their arrival.
    """
    buffer = Buffer(3)
    group = open_group(buffer, None, None, None)
    right, wrong = (Score(SampleId(1, i), float(i), "scored") for i in (0, 2))
    assert buffer.score([wrong, wrong, right]) == []
    failed = Score(SampleId(1, 1), 7.0, "timeout")
    assert buffer.score([failed]) == [group.place]
    assert group.failure == failed
    [scored] = buffer.scored([group.place])
    assert scored.group == Group(prompt=PROMPT, samples=tuple(group.samples))
    assert scored.rewards[::2] == (0.0, 2.0)
    assert math.isnan(scored.rewards[1])


def test_a_group_is_scored_once_also_when_a_score_comes_twice():
    """Fails when a group is returned for each of its scores after the last missing one."""
    buffer = Buffer(1)
    open_group(buffer, None)
    assert len(buffer.score([Score(SampleId(1, 0), 1.0, "scored")] * 2)) == 1


def test_lengths_are_those_of_the_open_groups_samples():
    """Fails when a finished sample counts as unfinished, a group's samples are left out, or those
    of one that is open no more are not.
    """
    buffer = Buffer(3)
    other = buffer.open(replace(PROMPT, id=0))
    open_group(buffer, 5, None, 0)
    buffer.remove([other.place])
    lengths, is_finished = buffer.lengths()
    assert lengths.tolist() == [5, 3, 0]
    assert is_finished.tolist() == [False, True, False]
    assert [array.size for array in buffer.lengths(without=[1])] == [0, 0]
    assert buffer.unfinished().tolist() == [3, 5]


def test_fresh_samples_are_the_shortest_of_those_with_tokens_of_this_version():
    """Of equal ones the first. Fails when a sample without tokens or one of an earlier version is
    taken, the version of a sample's first part stands for its last, or a group's tokens are counted
    wrongly as it grows.
    """
    buffer = Buffer(6)
    buffer.open(PROMPT)
    for index, (num_tokens, version) in enumerate([(5, 3), (2, 2), (4, 3), (3, 3), (3, 3)]):
        grown(buffer, completion(index, start=0, num_tokens=num_tokens, version=version))
    assert [s.index for s in buffer.fresh_samples(3, limit=3)] == [3, 4, 2]
    assert [s.index for s in buffer.fresh_samples(3, limit=9)] == [3, 4, 2, 0]
    assert buffer.open_tokens == 17
    grown(buffer, completion(1, start=2, num_tokens=7, version=4))
    assert [s.index for s in buffer.fresh_samples(4, limit=9)] == [1]


def test_a_restored_group_is_as_old_as_its_oldest_token():
    """Fails when it is as old as the first token that is read back."""
    buffer, again = Buffer(2), Buffer(2)
    group = buffer.open(PROMPT)
    grown(
        buffer,
        completion(1, start=0, num_tokens=3, version=2),
        completion(0, start=0, num_tokens=3, version=4),
    )
    OpenGroup.restore(group.save(), again.table, num_engines=1)
    assert again.table.oldest_versions == buffer.table.oldest_versions
    assert again.table.lengths == buffer.table.lengths
    assert again.table.context_versions[:2].tolist() == [4, 2]


def test_fresh_samples_are_put_in_order_by_prompt_and_response():
    """Fails when a longer prompt does not count, or a sample is taken from another group's row."""
    buffer = Buffer(2)
    for prompt_id, num_tokens in ((1, 9), (2, 1)):
        prompt = replace(PROMPT, id=prompt_id, token_ids=(5,) * num_tokens)
        buffer.open(prompt)
        for index in range(2):
            part = completion(index, start=0, num_tokens=2 + prompt_id + index, version=3)
            grown(buffer, replace(part, sample_id=SampleId(prompt_id, index)))
    fresh = buffer.fresh_samples(3, limit=3)
    assert [sample.id for sample in fresh] == [(2, 0), (2, 1), (1, 0)]


def test_fresh_samples_are_the_shortest_of_very_many():
    """Fails when the order of long sequences among hundreds of thousands wraps around."""
    buffer, size = Buffer(1), 90_000
    for id_ in range(size):
        buffer.open(replace(PROMPT, id=id_))
    view(buffer.table.lengths)[:] = 30_000  # times the samples: more than 2**31
    view(buffer.table.context_versions)[:] = 3
    view(buffer.table.lengths)[size // 2] = 20_000
    assert [sample.id.prompt_id for sample in buffer.fresh_samples(3, limit=1)] == [size // 2]


def test_a_failure_that_comes_after_its_group_is_closed_is_nobodys():
    """Fails when it becomes the failure of the group that has the place."""
    buffer = Buffer(1)
    buffer.remove([buffer.open(PROMPT).place])
    other = buffer.open(replace(PROMPT, id=2))
    assert buffer.score([Score(SampleId(1, 0), 0.0, "crash")]) == []
    assert other.failure is None
    assert not buffer.table.failures


def test_a_group_that_failed_is_restored_as_failed():
    """Fails when a sample without value is read back as one with the value nan."""
    buffer, again = Buffer(2), Buffer(2)
    group = buffer.open(PROMPT)
    failed = Score(SampleId(1, 1), math.nan, "crash", "died")
    buffer.score([failed])
    restored = OpenGroup.restore(group.save(), again.table, num_engines=1)
    assert restored.failure == failed
    assert [score.outcome for score in restored.scores] == ["crash"]


def test_of_several_failures_the_first_says_why():
    """Fails when a later one stands for it."""
    buffer = Buffer(2)
    group = open_group(buffer, None, None)
    first, second = (Score(SampleId(1, index), 0.0, "crash", str(index)) for index in (1, 0))
    buffer.score([first, second])
    assert group.failure == first
