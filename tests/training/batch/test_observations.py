"""Observations of an environment in packed rows."""

from array import array
from dataclasses import replace

import numpy as np
from light_samples import following, make_packer

from april_rl.training.batch.packing import Batch
from april_rl.types import Completion, Experts, Group, Observation, Prompt, Sample, ScoredGroup

PROMPT = Prompt(id=3, token_ids=(1, 2), text="", answer="", source="", has_environment=True)


def completion(sample: Sample, version: int, tokens: list[int]) -> Completion:
    logprobs = array("d", [-t / 8 for t in tokens])
    return following(sample, array("i", tokens), version=version, logprobs=logprobs)


def pack(sample: Sample, advantages: list[float]) -> Batch:
    group = ScoredGroup(group=Group(prompt=PROMPT, samples=(sample,)), rewards=(1.0,))
    return make_packer(max_staleness=5).pack([group], [[np.array(advantages)]], policy_version=7)


def test_contexts_are_separate_sequences_of_one_response():
    """Fails when a context can see the one before it, or counts as another sample."""
    sample = Sample(PROMPT, 0)
    sample = sample.with_span(completion(sample, 5, [3, 4]))
    sample = sample.with_span(Observation(array("i", [90, 91, 92]), begins_context=True))
    sample = sample.with_span(completion(sample, 7, [5]))
    sample = sample.with_span(Observation(array("i", [93])))
    sample = sample.with_span(completion(sample, 7, [6]))
    [[[row]]] = pack(sample, [3.0, 3, -2, -2]).minibatches
    assert row.token_ids.tolist() == [1, 2, 3, 4, 90, 91, 92, 5, 93, 6]
    assert (row.lengths, row.response_lengths) == ((4, 6), (4,))
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    predicting = [1, 2, 6, 8]
    assert np.flatnonzero(row.response_mask).tolist() == predicting
    assert row.labels[predicting].tolist() == [3, 4, 5, 6]
    assert row.credits[predicting].tolist() == [3, 3, -2, -2]


def test_each_token_has_its_own_experts_and_the_last_of_a_context_has_none():
    """Fails when they are shifted, or come from another context."""
    sample = Sample(PROMPT, 0)
    for version, tokens, said, known in (
        (5, [3, 4], Observation(array("i", [90])), [1, 2, 3]),
        (6, [5], Observation(array("i", [91, 92]), begins_context=True), [4, 90]),
        (7, [6, 7], Observation(array("i", [93]), is_final=True), [91, 92, 6]),
    ):
        chosen = Experts(array("B", [n for t in known for n in (t, 7, version, 7)]), 2, 2)
        part = replace(completion(sample, version, tokens), experts=chosen)
        sample = sample.with_span(part).with_span(said)
    [[[row]]] = pack(sample, [1.0] * 5).minibatches
    assert row.token_ids.tolist() == [1, 2, 3, 4, 90, 5, 91, 92, 6, 7, 93]
    assert row.is_routed.tolist() == [*[True] * 5, False, *[True] * 3, False, False]
    assert row.experts.shape == (11, 2, 2)
    assert row.experts[row.is_routed, 0, 0].tolist() == [1, 2, 3, 4, 90, 91, 92, 6]
    assert row.experts[row.is_routed, 1, 0].tolist() == [5] * 3 + [6] * 2 + [7] * 3


def test_observations_are_read_and_never_trained():
    """Fails when one is in the mask, missing in the sequence, or shifts what follows it."""
    sample = Sample(PROMPT, 0).with_span(Observation(array("i", [90])))
    sample = sample.with_span(completion(sample, 5, [3, 4, 5]))
    sample = sample.with_span(Observation(array("i", [91, 92])))
    sample = sample.with_span(completion(sample, 7, [6, 7]))
    sample = sample.with_span(Observation(array("i"), is_final=True))
    batch = pack(sample, [3.0, 3, 3, -2, -2])
    [[[row]]] = batch.minibatches
    assert row.token_ids.tolist() == [1, 2, 90, 3, 4, 5, 91, 92, 6, 7]
    assert (row.lengths, row.response_lengths) == ((10,), (5,))
    predicting = [2, 3, 4, 7, 8]
    assert np.flatnonzero(row.response_mask).tolist() == predicting
    assert np.flatnonzero(row.loss_weights).tolist() == predicting
    assert row.credits[predicting].tolist() == [3, 3, 3, -2, -2]
    assert row.labels[predicting].tolist() == [3, 4, 5, 6, 7]
    assert row.ages[predicting].tolist() == [2, 2, 2, 0, 0]
    assert row.behaviour_logprobs[predicting].tolist() == [-3 / 8, -4 / 8, -5 / 8, -6 / 8, -7 / 8]
