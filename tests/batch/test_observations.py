"""Observations of an environment in packed rows."""

from __future__ import annotations

from array import array
from functools import partial

import numpy as np

from april_rl.algorithm.age import age_weights, decay
from april_rl.algorithm.aggregation import token_mean
from april_rl.batch.packing import Packer
from april_rl.types import Completion, Group, Observation, Prompt, Sample, ScoredGroup

PROMPT = Prompt(id=3, token_ids=(1, 2), text="", answer="", source="", has_environment=True)


def completion(sample: Sample, version: int, tokens: list[int]) -> Completion:
    return Completion(
        sample_id=sample.id,
        start=sample.end,
        policy_version=version,
        context_version=version,
        token_ids=array("i", tokens),
        logprobs=array("d", [-t / 8 for t in tokens]),
        finish_reason="stop",
    )


def test_observations_are_read_and_never_trained():
    """Fails when one is in the mask, left out of the sequence, or moves what follows it."""
    sample = Sample(PROMPT, 0).extended(Observation(array("i", [90])))
    sample = sample.extended(completion(sample, 5, [3, 4, 5]))
    sample = sample.extended(Observation(array("i", [91, 92])))
    sample = sample.extended(completion(sample, 7, [6, 7]))
    sample = sample.extended(Observation(array("i"), is_final=True))
    group = ScoredGroup(group=Group(prompt=PROMPT, samples=(sample,)), rewards=(1.0,))
    packer = Packer(
        num_ranks=1,
        max_tokens=64,
        num_minibatches=1,
        max_staleness=5,
        max_response_tokens=64,
        age_weights=partial(age_weights, weight_of_age=decay(1.0)),
        aggregation=token_mean,
        hidden_size=32,
    )
    batch = packer.pack([group], [[np.array([3.0, 3, 3, -2, -2])]], policy_version=7)
    [[[row]]] = batch.minibatches
    assert row.token_ids.tolist() == [1, 2, 90, 3, 4, 5, 91, 92, 6, 7]
    assert (row.lengths, row.response_lengths, batch.num_response_tokens) == ((10,), (5,), 5)
    predicting = [2, 3, 4, 7, 8]
    assert np.flatnonzero(row.response_mask).tolist() == predicting
    assert np.flatnonzero(row.loss_weights).tolist() == predicting
    assert row.advantages[predicting].tolist() == [3, 3, 3, -2, -2]
    assert row.labels[predicting].tolist() == [3, 4, 5, 6, 7]
    assert row.ages[predicting].tolist() == [2, 2, 2, 0, 0]
    assert row.behaviour_logprobs[predicting].tolist() == [-3 / 8, -4 / 8, -5 / 8, -6 / 8, -7 / 8]
