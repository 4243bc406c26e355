"""A group in the making: the requests for its samples, what comes back of them, its scores."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
from fake_engine import FakeEngines, FakeScorer, reward
from hypothesis import given
from hypothesis import strategies as st
from rollout_runs import lognormal

from april_rl.evaluation.evaluator import Evaluator
from april_rl.metrics import Metrics
from april_rl.rollout.buffer import Buffer
from april_rl.rollout.dispatch import Dispatch
from april_rl.rollout.groups import Groups
from april_rl.rollout.ledger import LedgerError, State
from april_rl.rollout.open_group import OpenGroup, lengths_of
from april_rl.rollout.seeds import request_seed
from april_rl.rollout.siblings import Siblings
from april_rl.rollout.stats import StepStats
from april_rl.types import Completion, Prompt, SampleId, Score

PROMPT = Prompt(id=1, token_ids=(1, 2), text="", answer="", source="")


def completion(index: int, *, start: int, num_tokens: int, version: int) -> Completion:
    return Completion(
        sample_id=SampleId(1, index),
        start=start,
        policy_version=version,
        context_version=version,
        token_ids=(7,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        finish_reason=None,
    )


def open_group(*num_tokens: int | None, size: int = 4) -> OpenGroup:
    """Prompt 1 of two tokens; samples unfinished with so many tokens, finished with none more."""
    group = OpenGroup(PROMPT, size)
    for index, count in enumerate(num_tokens):
        if count is None:
            part = completion(index, start=0, num_tokens=3, version=0)
            group.extend(replace(part, finish_reason="stop"))
        elif count:
            group.extend(completion(index, start=0, num_tokens=count, version=0))
    group.begin_step()
    return group


def test_what_is_sent_waits_no_more_and_says_what_it_has_to_compute():
    """Fails when a finished sample is sent, one is sent twice, or the response so far is not among
    the tokens to prefill.
    """
    group = open_group(5, None, 0, 7)
    assert group.send(2, engine=3, expected_tokens=10.0) == ([0, 2], 2 + 5 + 10.0 + 2 + 10.0)
    assert (group.waiting, group.latest, group.homes) == ([3], 3, [3, None, 3, None])
    assert group.send(1, engine=0, expected_tokens=1.0) == ([3], 2 + 7 + 1.0)
    assert group.work == [17.0, 0.0, 12.0, 10.0]
    group.begin_step()
    assert (group.waiting, group.latest, group.homes) == ([0, 2, 3], None, [3, None, 3, 0])


@given(st.integers(1, 5), st.lists(st.integers(1, 9), max_size=3))
def test_siblings_are_the_requests_of_their_samples(count, lengths):
    """Fails when a sample goes on elsewhere than where it ends, gets another budget, or the seed of
    another sample or part.
    """
    parts = [tuple((n,) * n for n in lengths[: index % 4]) for index in range(count)]
    siblings = Siblings(7, (1, 2, 3), [*range(count)], parts, 40, 11)
    for index, request in enumerate(siblings.requests()):
        assert request.sample_id == SampleId(7, index)
        assert request.token_ids == [1, 2, 3, *chain.from_iterable(parts[index])]
        assert request.start + request.max_tokens == 40
        assert request.num_tokens == len(request.token_ids)
        assert request.seed == request_seed(11, request.sample_id, len(parts[index]))


def test_a_group_is_scored_when_every_sample_has_a_score_and_none_before():
    """Fails when a score that comes twice counts twice, a failed one is forgotten, or rewards are
    in the order of their arrival.
    """
    group = open_group(None, None, None, size=3)
    right, wrong = (Score(SampleId(1, i), float(i), "scored") for i in (0, 2))
    group.note(wrong)
    group.note(wrong)
    group.note(right)
    assert not group.is_scored
    failed = Score(SampleId(1, 1), 7.0, "timeout")
    group.note(failed)
    assert group.is_scored
    assert group.failure == failed
    assert group.scored().rewards == (0.0, 7.0, 2.0)


def test_a_group_is_scored_once_also_when_a_score_comes_twice():
    """Fails when a group is returned for each of its scores after the last missing one."""
    buffer = Buffer()
    group = buffer.open(PROMPT, 1)
    buffer.extend(
        group, replace(completion(0, start=0, num_tokens=3, version=0), finish_reason="stop")
    )
    assert buffer.score([Score(SampleId(1, 0), 1.0, "scored")] * 2) == [group]


def test_lengths_of_groups_are_those_of_their_samples():
    """Fails when a finished sample counts as unfinished, or a group's samples are left out."""
    groups = [open_group(5, None, 0), open_group(None, size=1)]
    lengths, is_finished = lengths_of(groups)
    assert lengths.tolist() == [5, 3, 0, 0, 3]
    assert is_finished.tolist() == [False, True, False, False, True]
    assert [array.size for array in lengths_of([])] == [0, 0]


def test_fresh_samples_are_the_shortest_of_those_with_tokens_of_this_version():
    """Of equal ones the first. Fails when a sample without tokens or one of an earlier version is
    taken, the version of a sample's first part stands for its last, or a group's tokens are counted
    wrongly as it grows.
    """
    buffer = Buffer()
    group = buffer.open(PROMPT, 6)
    for index, (num_tokens, version) in enumerate([(5, 3), (2, 2), (4, 3), (3, 3), (3, 3)]):
        buffer.extend(group, completion(index, start=0, num_tokens=num_tokens, version=version))
    assert [s.index for s in buffer.fresh_samples(3, limit=3)] == [3, 4, 2]
    assert [s.index for s in buffer.fresh_samples(3, limit=9)] == [3, 4, 2, 0]
    assert buffer.open_tokens == 17
    buffer.extend(group, completion(1, start=2, num_tokens=7, version=4))
    assert [s.index for s in buffer.fresh_samples(4, limit=9)] == [1]


def test_a_restored_group_is_as_old_as_its_oldest_token():
    """Fails when it is as old as the first token that is read back."""
    group = OpenGroup(PROMPT, 2)
    group.extend(completion(1, start=0, num_tokens=3, version=2))
    group.extend(completion(0, start=0, num_tokens=3, version=4))
    again = OpenGroup.restore(group.save(), num_engines=1)
    assert (again.oldest_version, group.oldest_version) == (2, 2)
    assert (again.lengths, again.waiting) == (group.lengths, [0, 1])


def test_fresh_samples_are_put_in_order_by_prompt_and_response():
    """Fails when a longer prompt does not count, or a sample is taken from another group's row."""
    buffer = Buffer()
    for prompt_id, num_tokens in ((1, 9), (2, 1)):
        prompt = replace(PROMPT, id=prompt_id, token_ids=(5,) * num_tokens)
        group = buffer.open(prompt, 2)
        for index in range(2):
            part = completion(index, start=0, num_tokens=2 + prompt_id + index, version=3)
            buffer.extend(group, replace(part, sample_id=SampleId(prompt_id, index)))
    fresh = buffer.fresh_samples(3, limit=3)
    assert [sample.id for sample in fresh] == [(2, 0), (2, 1), (1, 0)]


def test_no_more_of_a_group_is_sent_than_may_be_started():
    """Fails when the limit is passed over, or counts as sent what is not."""
    engines = FakeEngines(lognormal(9, 0.9), num_engines=1, budget=40)
    dispatch = Dispatch(engines, tick_steps=4, max_response_tokens=40, seed=0)
    dispatch.begin(num_slots=8)
    group = OpenGroup(PROMPT, 4)
    assert dispatch.submit(group, limit=2.0) == 2
    assert group.waiting == [2, 3]
    assert dispatch.submit(group, limit=math.inf) == 2


def sent_to(engine: int, *, policy_version: int) -> tuple[Groups, OpenGroup, StepStats]:
    """A group of two samples that `engine` has, with 10 tokens to compute for each."""
    groups = Groups(FakeScorer(), group_size=2, keep=lambda _: True)
    group = groups.open(PROMPT)
    assert group.send(2, engine=engine, expected_tokens=8.0) == ([0, 1], 20.0)
    return groups, group, StepStats(num_slots=2, policy_version=policy_version, clock=lambda: 0.0)


def test_a_sample_grows_once_and_only_by_the_engine_that_has_it():
    """Fails when a completion counts that comes from another engine, of an older version, for
    another place or a second time, or for a sample that no engine has.
    """
    groups, group, stats = sent_to(1, policy_version=3)
    part = completion(0, start=0, num_tokens=4, version=3)
    assert groups.extend([part], stats, engine=0) == ([], 0.0)
    late = [replace(part, policy_version=2), replace(part, start=1)]
    assert groups.extend(late, stats, engine=1) == ([], 0.0)
    assert groups.extend([part, part], stats, engine=1) == ([part], 10.0)
    assert (group.work, group.lengths.tolist()) == ([0.0, 10.0], [4, 0])
    more = completion(0, start=4, num_tokens=4, version=3)
    assert groups.extend([more], stats) == ([], 0.0)
    queued = completion(1, start=0, num_tokens=0, version=3)
    assert groups.extend([queued], stats) == ([queued], 10.0)
    assert (stats.completions, stats.generated_tokens, stats.prompt_tokens) == ([part], 4, 2)
    assert group.oldest_version == 3
    groups.park(stalled=())


def test_what_a_stalled_engine_had_is_asked_for_again_and_what_another_kept_is_lost():
    """Fails when what a stalled engine has counts as lost or stays with it, or what another engine
    did not give back does not.
    """
    groups, group, stats = sent_to(1, policy_version=3)
    groups.park(stalled=[1])
    assert groups.ledger.state(1) is State.parked
    assert (group.work, group.homes) == ([0.0, 0.0], [1, 1])
    part = completion(0, start=0, num_tokens=4, version=3)
    assert groups.extend([part], stats, engine=1) == ([], 0.0)
    assert groups.resume() == [group]
    assert group.send(1, engine=0, expected_tokens=8.0) == ([0], 10.0)
    assert groups.extend([part], stats, engine=1) == ([], 0.0)
    with pytest.raises(LedgerError, match=r"nothing for samples \[.*index=0\)\]"):
        groups.park(stalled=[1])


class CountingScorer(FakeScorer):
    """Counts nothing."""

    def metrics(self) -> Metrics:
        return Metrics({})


@pytest.mark.parametrize("num_slots", [2, 5, 100])
def test_every_held_out_sample_is_asked_for_once_with_a_seed_of_its_own(num_slots):
    """Fails when the samples of a prompt that are sent apart get each other's place, seed or
    reward, one is sent twice, or an engine holds more than its share.
    """
    law, budget = lognormal(9, 0.9), 40
    engines, scorer = FakeEngines(law, num_engines=2, budget=budget), CountingScorer()
    evaluator = Evaluator(
        engines,
        scorer,
        num_samples=3,
        max_response_tokens=budget,
        num_slots=num_slots,
        tick_steps=4,
        tick_timeout_s=1.0,
        seed=11,
    )
    most_held = 0

    def look(*_: object) -> None:
        nonlocal most_held
        most_held = max(most_held, *(len(e.running) + len(e.queue) for e in engines.each))

    for engine in engines.each:
        engine.on_step = look
    done: list[int] = []
    prompts = [replace(PROMPT, id=i, token_ids=(i,) * (1 + i)) for i in range(4)]
    read = evaluator.run("held_out", prompts, done.append).read()
    requests = [request for engine in engines.each for request in engine.requests]
    ids = [SampleId(-1 - i, index) for i in range(4) for index in range(3)]
    assert sorted(request.sample_id for request in requests) == sorted(ids)
    for request in requests:
        assert request.seed == request_seed(11, request.sample_id, 0)
        assert len(request.prompt_token_ids) == -request.sample_id.prompt_id
        assert (request.start, request.max_tokens) == (0, budget)
    assert most_held <= -(-num_slots // 2)
    assert done == [*range(1, 13)]
    lengths = [min(law(id_), budget) for id_ in ids]
    assert read["eval/held_out/response_tokens_mean"] == pytest.approx(sum(lengths) / 12)
    assert read["eval/held_out/avg_at_k"] == pytest.approx(sum(map(reward, ids)) / 12)
