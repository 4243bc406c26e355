"""Samples with an environment: turns in a step, and what a step starts."""

from dataclasses import replace

from fake_engine import experts
from light_samples import PROMPT, completion
from rollout_runs import Run, Setup, constant
from sent_samples import Sent

from april_rl.training.rollout.buffer import Buffer
from april_rl.training.rollout.open_group import OpenGroup, SampleState
from april_rl.types import Completion, Observation, Reply, SampleId

ASKED = replace(PROMPT, has_environment=True)
TURN = replace(completion(0, start=1, num_tokens=5, version=3), finish_reason="stop")
SAID = Observation((9, 9))


def begin(sent: Sent) -> OpenGroup:
    """Return a group of one sample on engine 0, after one token of its environment."""
    group = sent.groups.open(ASKED)
    sent.groups.resume()
    sent.groups.take_replies([Reply(SampleId(1, 0), 0, Observation((9,)))])
    sent.dispatch.add(group)
    sent.dispatch.assign(limit=1)
    return group


def take_turn(sent: Sent, group: OpenGroup, turn: Completion) -> None:
    assert sent.extend(turn) == [turn]
    sent.dispatch.take_back(group, turn)


def test_a_reply_counts_once_and_only_for_its_own_turn():
    """Fails when a reply is accepted that comes a second time or belongs to an earlier turn."""
    sent = Sent(group_size=1)
    group = begin(sent)
    take_turn(sent, group, TURN)
    assert group.states == [SampleState.acting]
    assert sent.groups.take_replies([Reply(TURN.sample_id, 1, SAID)]) == []
    answer = Reply(TURN.sample_id, 6, SAID)
    assert sent.groups.take_replies([answer, answer]) == [(group, answer)]
    assert sent.groups.take_replies([Reply(TURN.sample_id, 8, SAID)]) == [], "it does not act"
    assert [span.token_ids for span in group.spans[0]] == [(9,), (7,) * 5, (9, 9)]
    assert (group.ends, group.lengths) == ([8], [5])


def test_the_engine_reads_only_the_new_context():
    """Fails when a request contains tokens of an earlier context, or does not start at the end of
    the sample.
    """
    sent = Sent(group_size=1)
    group = begin(sent)
    take_turn(sent, group, TURN)
    sent.groups.take_replies([Reply(TURN.sample_id, 6, SAID._replace(begins_context=True))])
    sent.dispatch.add_turn(group)
    assert sent.dispatch.assign(limit=1) == 1
    *_, request = sent.dispatch._requests(0).each()
    assert (request.token_ids, request.num_tokens, request.start) == ([9, 9], 2, 8)


def test_a_request_counts_the_tokens_of_its_context_whose_experts_are_known():
    """Fails when a token's experts would be reported twice or never, or tokens of an earlier
    context count.
    """
    sent = Sent(group_size=1)
    group = begin(sent)
    assert group.num_routed(0) == 0
    take_turn(sent, group, replace(TURN, experts=experts(TURN.sample_id, range(7), 3)))
    assert group.num_routed(0) == len(ASKED.token_ids) + 1 + 5 - 1
    sent.groups.take_replies([Reply(TURN.sample_id, 6, SAID)])
    sent.dispatch.add_turn(group)
    sent.dispatch.assign(limit=1)
    *_, request = sent.dispatch._requests(0).each()
    assert request.num_routed == 7
    turn = replace(TURN, start=8, experts=experts(TURN.sample_id, range(7, 14), 3))
    take_turn(sent, group, turn)
    sent.groups.take_replies([Reply(TURN.sample_id, 13, SAID._replace(begins_context=True))])
    assert group.num_routed(0) == 0


def test_a_turn_has_its_own_limit_within_the_budget():
    """Fails when a limit counts other turns, or tokens that an aborted request sampled are
    forgotten.
    """
    sent = Sent(group_size=1)
    group = begin(sent)
    take_turn(sent, group, TURN)
    sent.groups.take_replies(
        [Reply(TURN.sample_id, 6, SAID._replace(max_turn_tokens=4, stop=("b",)))]
    )
    assert group.room(0, budget=40) == 4
    sent.dispatch.add_turn(group)
    sent.dispatch.assign(limit=1)
    *_, request = sent.dispatch._requests(0).each()
    assert (request.max_tokens, request.stop) == (4, ("b",))
    part = replace(completion(0, start=8, num_tokens=1, version=3), finish_reason=None)
    take_turn(sent, group, part)
    assert group.room(0, budget=40) == 3
    assert group.room(0, budget=7) == 1


def test_another_turn_is_not_a_resumed_sample_and_the_length_of_a_turn_is_learned():
    """Fails when its context counts as prefilled again, or the expected length includes
    contexts.
    """
    sent = Sent(group_size=1)
    group = begin(sent)
    take_turn(sent, group, TURN)
    sent.groups.take_replies([Reply(TURN.sample_id, 6, SAID)])
    sent.dispatch.add_turn(group)
    assert sent.dispatch.num_waiting == 1
    assert sent.dispatch.assign(limit=1) == 1
    before = sent.dispatch._expected.tokens
    second = replace(completion(0, start=8, num_tokens=1, version=3), finish_reason="stop")
    take_turn(sent, group, second)
    assert sent.dispatch._expected.tokens < before, "the mean moves towards one token"
    assert [back.is_resumed for back in sent.record.returned] == [False, False]
    assert sent.record.reprefill_tokens == 0


def test_a_synchronous_step_starts_its_own_samples_in_any_turn():
    """Fails when another turn counts as another sample, so that other prompts are opened."""
    setup = Setup(
        num_groups=4, group_size=2, alpha=1.0, refill=False, turns=3, length_of=constant(2)
    )
    run = Run(setup)
    for step in range(1, 4):
        assert len(run.step().groups) == 4
        assert len(run.prompts.taken) == 4 * step
        assert run.alive == []


def test_samples_of_starting_environments_count_as_waiting_for_an_engine():
    """Fails when prompts are opened without end while their environments start."""
    buffer = Buffer(2)
    buffer.open(ASKED)
    buffer.open(replace(PROMPT, id=2))
    assert buffer.num_beginning == 2
    setup = Setup(num_groups=2, group_size=2, alpha=1.0, turns=1, delay=6, length_of=constant(9))
    run = Run(setup)
    run.step()
    assert len(run.prompts.taken) <= 6
