"""A teacher's log-probabilities in an update."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_setup import (
    Example,
    all_plain_logprobs,
    learner_logprobs,
    make_examples,
    make_learner,
    pack_minibatch,
    plain_adamw,
    plain_model,
    plain_update,
    write_model,
)

from april_rl.config.models_beside import TeacherConfig
from april_rl.training.batch.packing import MicroBatch

pytestmark = pytest.mark.usefixtures("_group")


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory) -> str:
    """Return another model than the policy's: its weights are doubled."""
    folder = write_model(tmp_path_factory.mktemp("teacher"))
    model = plain_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model.save_pretrained(folder)
    return folder


def test_an_update_with_a_teacher_equals_plain_torch(path, teacher_path):
    """Two minibatches of old tokens with their own rewards. Fails when the teacher's value is
    compared with the moving policy, is not weighted, or lacks the importance weight.
    """
    examples = make_examples(path, noise=0.3, age=1)
    learner = make_learner(path, teacher=TeacherConfig(path=teacher_path, weight=0.7))
    minibatches = [examples[:3], examples[3:]]
    learner.update([pack_minibatch([part]) for part in minibatches])
    model = plain_model(path)
    plain_update(
        model,
        plain_adamw(model),
        minibatches,
        teacher=plain_model(teacher_path),
        teacher_weight=0.7,
    )
    expected = all_plain_logprobs(model, examples)
    torch.testing.assert_close(learner_logprobs(learner, examples), expected, rtol=0, atol=2e-5)
    start = all_plain_logprobs(plain_model(path), examples)
    assert (expected - start).abs().max() > 1e-2


def test_a_policy_that_is_its_own_teacher_learns_nothing(path):
    """Fails when the difference has a term other than the two log-probabilities."""
    examples = [replace(e, advantage=0.0) for e in make_examples(path, noise=0.0, age=0)]
    learner = make_learner(path, teacher=TeacherConfig(path=path), weight_decay=0.0)
    start = learner_logprobs(learner, examples)
    metrics = learner.update([pack_minibatch([examples])]).read()
    assert metrics["loss/teacher_kl"] == 0.0
    assert torch.equal(learner_logprobs(learner, examples), start)


def test_a_teacher_on_a_server_gives_the_same_update_as_one_in_the_worker(path, teacher_path):
    """Its values come with the batch. Fails when they are left out, or taken from another row."""
    examples = make_examples(path, noise=0.3, age=1)
    parts = [examples[:3], examples[3:]]
    beside = make_learner(path, teacher=TeacherConfig(path=teacher_path, weight=0.7))
    beside.update([pack_minibatch([part]) for part in parts])
    server = TeacherConfig(base_url="http://t/v1", model="t", weight=0.7)
    remote = make_learner(path, teacher=server)
    metrics = remote.update([[with_teacher(part, teacher_path)] for part in parts]).read()
    assert metrics["loss/teacher_kl"] > 0.01
    torch.testing.assert_close(
        learner_logprobs(remote, examples), learner_logprobs(beside, examples), rtol=0, atol=2e-5
    )


def with_teacher(examples: list[Example], teacher_path: str) -> MicroBatch:
    """Return a row of the examples with the log-probabilities of a teacher, computed in plain
    torch.
    """
    [row] = pack_minibatch([examples])
    values = np.zeros(len(row.token_ids), np.float32)
    values[row.response_mask] = all_plain_logprobs(plain_model(teacher_path), examples)
    return replace(row, teacher_logprobs=values)
