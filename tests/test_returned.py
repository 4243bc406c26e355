"""What comes back of samples: what of it counts, and for whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from light_samples import PROMPT, completion
from sent_samples import Sent

from april_rl.rollout.ledger import LedgerError, State
from april_rl.rollout.open_group import OpenGroup
from april_rl.rollout.sample_table import view
from april_rl.ticks import Completions
from april_rl.types import SampleId, Score


def sent_to(engine: int) -> tuple[Sent, OpenGroup]:
    """A group of two samples that `engine` has, with 10 tokens to compute for each."""
    sent = Sent(group_size=2)
    group = sent.groups.open(PROMPT)
    view(sent.table.homes)[group.rows] = engine
    view(sent.table.work)[group.rows] = 10.0
    return sent, group


def work(sent: Sent, group: OpenGroup) -> list[float]:
    return [sent.table.work[row] for row in group.rows]


def test_a_sample_grows_once_and_only_by_the_engine_that_has_it():
    """Fails when a completion counts that comes from another engine, of an older version, for
    another place or a second time, or for a sample that no engine has.
    """
    sent, group = sent_to(1)
    part = completion(0, start=0, num_tokens=4, version=3)
    assert sent.extend(part, engine=0) == []
    late = [replace(part, policy_version=2), replace(part, start=1)]
    assert sent.extend(*late, engine=1) == []
    of_nobody = replace(part, sample_id=SampleId(8, 0))
    assert sent.extend(of_nobody, part, part, engine=1) == [part]
    assert (work(sent, group), [*sent.table.lengths]) == ([0.0, 10.0], [4, 0])
    more = completion(0, start=4, num_tokens=4, version=3)
    assert sent.extend(more) == []
    queued = completion(1, start=0, num_tokens=0, version=3)
    assert sent.extend(queued) == [queued]
    stats = sent.stats
    assert (stats.returned_samples, stats.generated_tokens, stats.prompt_tokens) == (1, 4, 2)
    assert [each.lengths.tolist() for each in stats.returned if len(each.rows)] == [[4]]
    assert [*sent.table.oldest_versions] == [3]
    assert group.samples[0].completions == (part,)
    sent.groups.park(stalled=())


def test_what_a_stalled_engine_had_is_asked_for_again_and_what_another_kept_is_lost():
    """Fails when what a stalled engine has counts as lost or stays with it, or what another engine
    did not give back does not.
    """
    sent, group = sent_to(1)
    sent.groups.park(stalled=[1])
    assert sent.groups.ledger.state(1) is State.parked
    assert (work(sent, group), [sent.table.homes[row] for row in group.rows]) == ([0.0] * 2, [1, 1])
    part = completion(0, start=0, num_tokens=4, version=3)
    assert sent.extend(part, engine=1) == []
    assert sent.groups.resume().tolist() == [*group.rows]
    sent.table.homes[group.rows[0]], sent.table.work[group.rows[0]] = 0, 10.0
    assert sent.extend(part, engine=1) == []
    with pytest.raises(LedgerError, match=r"nothing for samples \[.*index=0\)\]"):
        sent.groups.park(stalled=[1])


def test_a_response_that_ends_without_a_token_is_finished():
    """Fails when it counts as a request that never had a slot."""
    sent, group = sent_to(1)
    last = replace(completion(0, start=0, num_tokens=0, version=3), finish_reason="stop")
    assert sent.extend(last, engine=1) == [last]
    assert [sample.id for sample in group.unscored] == [SampleId(1, 0)]
    assert sent.stats.finished_samples == 1
    other = replace(last, sample_id=SampleId(1, 1))
    assert sent.extend(other, engine=1) == [other]
    sent.groups.score([Score(SampleId(1, index), float(index), "scored") for index in (0, 1)])
    assert sent.groups.buffer.ready_versions() == {0: 1}, "as after it was saved"


def test_what_came_late_takes_nothing_of_another_engine():
    """Fails when, of what is passed over, the engine, the work or the place of another is kept."""
    sent = Sent(group_size=2)
    rows = [*sent.groups.open(PROMPT).rows]
    view(sent.table.homes)[rows], view(sent.table.work)[rows] = [0, 1], [10.0, 20.0]
    view(sent.table.lengths)[rows] = [0, 5]
    late = replace(completion(0, start=0, num_tokens=1, version=3), policy_version=2)
    came = Completions([late, completion(1, start=5, num_tokens=1, version=3)])
    back = sent.groups.extend(came, sent.stats, engines=np.array([0, 1]))
    assert [column.tolist() for column in (back.rows, back.homes, back.work, back.starts)] == [
        [rows[1]],
        [1],
        [20.0],
        [5],
    ]
    assert (sent.stats.resumed_samples, sent.stats.reprefill_tokens) == (1, 2 + 5)
