"""Conversion of samples to plain data and back."""

import time
from array import array
from dataclasses import replace

import pytest
from light_samples import PROMPT

from april_rl.errors import RunError
from april_rl.training.rollout.codec import (
    FORMAT,
    check_observations,
    check_state,
    restore_sample,
    save_prompt,
    save_sample,
)
from april_rl.types import Completion, Observation, Sample, SampleId, Span

SPOKEN = replace(PROMPT, has_environment=True)
HEARD = Observation(array("i", [7]), stop=("END",))


def sample_of(num_turns, *, has_reply=True):
    """Return an episode with turns of three tokens, each after an observation of one token."""
    spans: list[Span] = []
    for turn in range(num_turns):
        said = Completion(
            sample_id=SampleId(SPOKEN.id, 0),
            start=4 * turn + 1,
            policy_version=1,
            context_version=1,
            token_ids=array("i", [5] * 3),
            logprobs=array("d", [-0.5] * 3),
            finish_reason="stop",
        )
        spans += [HEARD, said]
    return Sample(SPOKEN, 0, (*spans, HEARD) if has_reply else tuple(spans))


def check(sample, *, budget):
    group = {"prompt": save_prompt(SPOKEN), "samples": [save_sample(sample)]}
    state = {"format": FORMAT, "num_groups": 1, "max_staleness": 1, "group_size": 1}
    check_state(
        {**state, "buffer": {"open": [group]}},
        num_groups=1,
        group_size=1,
        max_staleness=1,
        max_response_tokens=budget,
    )


def test_a_sample_of_many_turns_is_restored_unchanged_and_quickly():
    sample = sample_of(4000)
    saved = save_sample(sample)
    began_s = time.process_time()
    again = restore_sample(saved, prompt=SPOKEN, index=0)
    check(sample, budget=20_000)
    assert time.process_time() - began_s < 1.0
    assert again == sample


def test_the_budget_must_leave_room_only_for_a_sample_that_needs_tokens():
    check(sample_of(5), budget=16)
    with pytest.raises(RunError, match=r"max_response_tokens=15, .* has 15 tokens already"):
        check(sample_of(5), budget=15)
    check(sample_of(5, has_reply=False), budget=1)


@pytest.mark.parametrize(("limit", "is_refused"), [(4, False), (3, True)])
def test_a_sample_with_too_many_observation_tokens_is_refused(limit, is_refused):
    """Fails when a lower environment.max_observation_tokens only ends the resumed run later, in its
    worker.
    """
    begun = replace(sample_of(4).spans[1], finish_reason=None)
    sample = Sample(SPOKEN, 0, (*sample_of(4, has_reply=False).spans[:-1], begun))
    group = {"prompt": save_prompt(SPOKEN), "samples": [save_sample(sample)]}
    state = {"buffer": {"open": [group]}}
    if not is_refused:
        check_observations(state, max_observation_tokens=limit)
        return
    with pytest.raises(RunError, match=r"max_observation_tokens=3, but .* read 4 tokens"):
        check_observations(state, max_observation_tokens=limit)
