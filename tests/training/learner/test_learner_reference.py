"""The frozen reference: its weights, its effect on training, and that it exists only if it is
needed.
"""

from dataclasses import replace

import pytest
import torch
from learner_setup import (
    ALGORITHM,
    Example,
    learner_logprobs,
    make_examples,
    make_learner,
    pack_minibatch,
)

from april_rl.config.choices import ComputeDtype, Kl

pytestmark = pytest.mark.usefixtures("_group")

KL = replace(ALGORITHM, kl=Kl.k3, kl_coefficient=0.1)


def test_the_reference_is_the_starting_policy_and_pulls_back_to_it(path):
    """At the start the divergence is exactly 0 and changes nothing; after a step away from it,
    steps on the divergence alone lead back. Fails when the reference changes with the policy, when
    its log-probabilities have another precision, or when the sign is wrong.
    """
    algorithm = replace(KL, kl_coefficient=1.0)
    learner = make_learner(path, algorithm=algorithm, weight_decay=0.0, lr=2e-3)
    examples = make_examples(path, noise=0.0, age=1)
    flat = [replace(example, advantage=0.0) for example in examples]
    start = learner_logprobs(learner, examples)

    def step(chosen: list[Example]) -> float:
        return learner.update([pack_minibatch([chosen])]).read()["loss/reference_kl"]

    assert step(flat) == 0.0
    assert torch.equal(learner_logprobs(learner, examples), start)
    for _ in range(3):
        step(examples)
    divergences = [step(flat) for _ in range(6)]
    assert divergences[0] > 1e-4
    assert divergences[-1] < 0.5 * divergences[0], divergences


def test_an_updated_reference_is_the_policy_after_every_second_update(path):
    """Fails when it is updated in every update, only once, or with an earlier policy."""
    learner = make_learner(path, algorithm=replace(KL, reference_every=2), lr=2e-3)
    examples = make_examples(path, noise=0.0, age=1)
    whole, halves = [examples], [examples[:3], examples[3:]]
    # Updates of one and of two optimizer steps: only updates count.
    batches = [[pack_minibatch([part]) for part in parts] for parts in (whole, halves)]
    divergences = [
        learner.update(batches[number % 3 % 2]).read()["loss/reference_kl"] for number in range(6)
    ]
    first_passes = [divergence == 0.0 for divergence in divergences]
    assert first_passes == [True, False, True, False, False, False]


def test_a_reference_gives_the_numbers_of_the_policy_in_half_precision_too(path):
    """Stored in bfloat16, it computes what the float32 master weights compute. Fails when it is
    stored in one precision and computed in another.
    """
    learner = make_learner(path, algorithm=KL, compute_dtype=ComputeDtype.bfloat16)
    examples = make_examples(path, noise=0.0, age=1)
    metrics = learner.update([pack_minibatch([examples[:3], examples[3:]])]).read()
    assert metrics["loss/reference_kl"] == 0.0
    stored = {p.dtype for p in learner._reference._policy.parameters()}
    assert stored == {torch.bfloat16}


def test_without_a_divergence_or_a_teacher_no_second_model_is_loaded(path):
    learner = make_learner(path)
    assert learner._reference is learner._teacher is None


def test_every_forward_pass_counts_as_progress(path):
    """Fails when a long pass of the reference looks like a hung worker."""
    passes: list[int] = []
    learner = make_learner(path, algorithm=KL, on_forward=lambda: passes.append(len(passes)))
    examples = make_examples(path, noise=0.0, age=1)
    learner.update([pack_minibatch([examples[:3], examples[3:]])])
    assert len(passes) == 2 * 2  # two rows, each through the reference and the policy
