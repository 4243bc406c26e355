"""Completions that engines return: which ones count, and for which sample."""

from dataclasses import replace

import pytest
from fake_engine import FakeEngines
from light_samples import completion
from rollout_runs import Run, Setup
from sent_samples import Sent

from april_rl.training.rollout.buffer import LedgerError
from april_rl.training.rollout.open_group import OpenGroup, SampleState
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.types import Completion, SampleId, Score

RUNNING, PARKED = SampleState.running, SampleState.parked


def sent_to(engine: int) -> tuple[Sent, OpenGroup]:
    """Return a group of two samples that were sent to `engine`."""
    sent = Sent(group_size=2)
    group = sent.open(1)
    for index in (0, 1):
        group.assign(index, engine=engine, expected_tokens=8.0)
    return sent, group


def test_a_sample_grows_only_by_completions_of_its_own_engine():
    """Fails when a completion is accepted that comes from another engine or an older version, for
    another position or a second time, or for a sample that no engine has.
    """
    sent, group = sent_to(1)
    part = completion(0, start=0, num_tokens=4, version=3)
    assert sent.extend(part, engine=0) == []
    late = [replace(part, policy_version=2), replace(part, start=1)]
    assert sent.extend(*late, engine=1) == []
    of_nobody = replace(part, sample_id=SampleId(8, 0))
    assert sent.extend(of_nobody, part, part, engine=1) == [part]
    assert (group.states, group.lengths) == ([PARKED, RUNNING], [4, 0])
    assert sent.extend(completion(0, start=4, num_tokens=4, version=3)) == []
    queued = completion(1, start=0, num_tokens=0, version=3)
    assert sent.extend(queued) == [queued]
    [back] = sent.record.returned
    assert (back.sample_id, back.prompt_tokens, back.start, back.tokens) == ((1, 0), 2, 0, 4)
    assert group.oldest_version == 3
    assert [sample.completions for sample in group.samples] == [(part,), ()]
    sent.groups.park(stalled=())


def test_a_response_that_ends_without_a_token_is_finished():
    """Fails when it counts as a request that never got a slot."""
    sent, group = sent_to(1)
    last = replace(completion(0, start=0, num_tokens=0, version=3), finish_reason="stop")
    assert sent.extend(last, engine=1) == [last]
    assert group.sample_ids(SampleState.finished) == [SampleId(1, 0)]
    assert sent.record.finished_samples == 1
    other = replace(last, sample_id=SampleId(1, 1))
    assert sent.extend(other, engine=1) == [other]
    sent.groups.take_scores([Score(SampleId(1, index), float(index), "scored") for index in (0, 1)])
    assert sent.buffer.ready_versions() == {0: 1}, "as after it was saved"


def test_resumed_samples_and_their_prefilled_tokens_are_counted():
    """Fails when the prompt or the response so far is left out."""
    sent, group = sent_to(1)
    group.lengths = group.ends = [0, 5]
    group.spans[1] = (completion(1, start=0, num_tokens=5, version=1),)
    assert sent.extend(completion(1, start=5, num_tokens=1, version=3), engine=1)
    [back] = sent.record.returned
    assert (back.start, back.age, sent.record.reprefill_tokens) == (5, 2, 2 + 5)


class ForgetfulEngines(FakeEngines):
    """Engines that finish the first sample and never report it."""

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        return [
            (engine, replace(tick, finished=Completions(map(_but_the_first, tick.finished))))
            for engine, tick in super().wait(timeout_s, gather_s=gather_s)
        ]


def _but_the_first(completion: Completion) -> Completion:
    is_first = completion.sample_id == SampleId(0, 0)
    return replace(completion, start=99) if is_first else completion


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("refill", [True, False])
def test_a_step_does_not_wait_forever_for_a_sample_that_its_engine_forgot(refill, num_engines):
    """Nothing else is left to do. Fails when the step polls idle engines forever."""
    setup = Setup(
        **{"num_groups": 1, "group_size": 1, "alpha": 1.0, "max_staleness": 1},
        **{"refill": refill, "num_engines": num_engines, "delay": 9},
    )
    engines = ForgetfulEngines(setup.length_of, num_engines=num_engines, budget=setup.budget)
    with pytest.raises(LedgerError, match=r"did not return samples \[.*prompt_id=0, index=0"):
        Run(setup, engines).step()
