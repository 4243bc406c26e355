"""The data types: a sample grows by whole completions, and wrong values are refused."""

import pickle
import sys
from array import array
from dataclasses import FrozenInstanceError, replace
from random import Random

import numpy as np
import pytest

from april_rl.run.checkpointing.columns import read_state, write_state
from april_rl.training.algorithm.advantages import dr_grpo, grpo, rloo
from april_rl.training.rollout.codec import restore_sample, save_sample
from april_rl.types import Completion, Group, Prompt, Sample, SampleId, ScoredGroup

PROMPT = Prompt(id=3, token_ids=(1, 2), text="", answer="", source="")
PART = Completion(
    sample_id=SampleId(3, 0),
    start=0,
    policy_version=1,
    context_version=1,
    token_ids=(5, 6),
    logprobs=(-0.5, -0.25),
    finish_reason=None,
)
END = replace(
    PART, start=2, policy_version=4, token_ids=(7,), logprobs=(-1.0,), finish_reason="stop"
)


def test_a_sample_is_the_concatenation_of_its_completions():
    empty = Sample(prompt=PROMPT, index=0)
    assert (empty.num_tokens, empty.oldest_version, empty.is_finished) == (0, None, False)
    sample = empty.with_span(PART).with_span(END)
    assert sample.token_ids == array("i", (5, 6, 7))
    assert sample.behaviour_logprobs == array("d", (-0.5, -0.25, -1.0))
    assert sample.policy_versions == (1, 1, 4)
    assert (sample.oldest_version, sample.finish_reason) == (1, "stop")


@pytest.mark.parametrize("wrong", [END, replace(PART, sample_id=SampleId(3, 1))])
def test_a_completion_that_does_not_fit_is_refused(wrong):
    with pytest.raises(AssertionError):
        Sample(prompt=PROMPT, index=0).with_span(wrong)


def test_a_finished_sample_cannot_be_extended():
    finished = Sample(prompt=PROMPT, index=0).with_span(PART).with_span(END)
    with pytest.raises(AssertionError, match="is finished"):
        finished.with_span(replace(PART, start=3))


def test_a_token_without_its_logprob_is_an_error():
    with pytest.raises(ValueError, match=r"2 tokens came with 1 behaviour log-probabilities"):
        replace(PART, logprobs=(-0.5,))


def random_completion(count: int) -> Completion:
    """Return a completion as an engine makes it, with the largest possible vocabulary."""
    random = Random(count)
    return replace(
        PART,
        token_ids=array("i", (random.randrange(2**31) for _ in range(count))),
        logprobs=array("d", (-random.expovariate(1.0) for _ in range(count))),
    )


def held_bytes(completion: Completion) -> int:
    return sys.getsizeof(completion.token_ids) + sys.getsizeof(completion.logprobs)


def test_a_completion_takes_thirteen_bytes_per_token_in_memory_and_when_sent():
    """Fails when tokens or log-probabilities are Python numbers at either end."""
    count = 2_700
    sent = pickle.dumps(random_completion(count), protocol=5)
    received = pickle.loads(sent)
    assert received == random_completion(count)
    assert len(sent) <= 13 * count
    assert held_bytes(received) <= 13 * count


def test_a_saved_sample_is_restored_bit_by_bit_and_as_small(tmp_path):
    """Written to files and read back. Fails when a log-probability is rounded, or the restored
    sample is larger than the engine's.
    """
    logprobs = array("d", (-1 / 3, -5e-324, -1.7976931348623157e308, -0.0, -0.1))
    first = replace(PART, token_ids=array("i", (0, 1, 2, 3, 2**31 - 1)), logprobs=logprobs)
    rest = replace(random_completion(2_700), start=5, policy_version=4, finish_reason="length")
    sample = Sample(prompt=PROMPT, index=0, spans=(first, rest))
    write_state(save_sample(sample), tmp_path, "sample")
    restored = restore_sample(read_state(tmp_path, "sample"), prompt=PROMPT, index=0)
    assert restored == sample
    assert restored.behaviour_logprobs.tobytes() == sample.behaviour_logprobs.tobytes()
    assert held_bytes(restored.completions[1]) <= 13 * 2_700


def test_a_group_is_complete_when_all_its_samples_are_finished():
    finished = Sample(prompt=PROMPT, index=0).with_span(PART).with_span(END)
    group = Group(prompt=PROMPT, samples=(finished, Sample(prompt=PROMPT, index=1)))
    assert not group.is_complete
    assert group.oldest_version == 1
    assert Group(prompt=PROMPT, samples=(finished,)).is_complete
    assert Group(prompt=PROMPT, samples=()).oldest_version is None


@pytest.mark.parametrize(
    ("rewards", "has_signal"),
    [
        ((0.0, 1.0), True),
        ((1.0, 1.0), False),
        ((0.5,), False),
        ((0.1 + 0.2, 0.3, 0.3), False),  # sums of weighted rewards depend on the order of the terms
        ((0.1 + 0.2 - 0.3, 0.0), False),
        ((0.7,) * 7, False),  # their computed mean is not 0.7
        ((float(np.float32(0.3)), 0.3), False),
        ((1000.0, 1000.0005), False),
        ((1000.0, 1000.01), True),
        ((-0.3, -0.30001), True),
        ((0.0, 1e-5), True),
    ],
)
def test_a_group_has_signal_when_its_rewards_differ_by_more_than_rounding(rewards, has_signal):
    """Dynamic sampling and advantages use one rule. Fails when one of them compares bit by bit, or
    equal rewards have an advantage.
    """
    group = Group(prompt=PROMPT, samples=())
    assert ScoredGroup(group=group, rewards=rewards).has_signal == has_signal
    for advantages in (grpo, dr_grpo, rloo):
        assert bool(advantages(rewards).any()) == has_signal


def test_data_types_are_immutable():
    with pytest.raises(FrozenInstanceError):
        PART.start = 3
