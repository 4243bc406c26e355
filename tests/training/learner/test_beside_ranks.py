"""A critic and a teacher on two ranks, with sharded and with copied weights, give the results of
one rank.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from forked_ranks import results_of_ranks
from learner_setup import (
    group_of_one,
    learner_logprobs,
    make_actor_critic,
    num_tokens,
    pack,
    plain_model,
    write_model,
)
from test_learner_critic import CRITIC, rewarded

from april_rl.config.choices import Offload
from april_rl.config.models_beside import TeacherConfig
from april_rl.metrics import Metrics, merge
from april_rl.training.batch.packing import MicroBatch

pytestmark = pytest.mark.slow
NUM_RANKS = 2
CASES: dict[str, dict[str, Any]] = {
    "sharded": {"shard_size": 2, "offload": Offload.all},
    "copied": {"shard_size": 1},
}


def minibatches(path: str, *, rank: int, num_ranks: int) -> list[list[MicroBatch]]:
    """Two minibatches of three examples. The second of two ranks gets one example, then none."""
    examples = rewarded(path)
    dealt = [[[0, 1, 2]]] if num_ranks == 1 else [[[0, 1], [2]], [[], []]]
    return [
        [pack([part[i] for i in bin_], total=num_tokens([part])) for bin_ in dealt[rank]]
        for part in (examples[:3], examples[3:])
    ]


def train(folder: str, *, rank: int, num_ranks: int, **settings: Any) -> dict[str, Any]:
    """Train three updates; the first one trains only the critic."""
    path = f"{folder}/model"
    trained = make_actor_critic(
        path,
        critic=replace(CRITIC, warmup_steps=1),
        teacher=TeacherConfig(path=f"{folder}/teacher", weight=0.5),
        num_critic_only_steps=2,
        **settings,
    )
    metrics: list[Metrics] = []
    for _ in range(3):
        metrics.append(trained.update(minibatches(path, rank=rank, num_ranks=num_ranks)))
        trained.policy.offload()
    logprobs = learner_logprobs(trained.policy, rewarded(path))
    critic = trained.critic.trained
    critic.reload()
    critic.model.reshard_all()
    values = {name: p.full_tensor() for name, p in critic.model.named_parameters()}
    return {"metrics": metrics, "logprobs": logprobs, "critic": values}


def train_all(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    return {
        name: train(folder, rank=rank, num_ranks=NUM_RANKS, **settings)
        for name, settings in CASES.items()
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "model", num_layers=2)
    teacher = plain_model(write_model(folder / "teacher", num_layers=2))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    teacher.save_pretrained(folder / "teacher")
    ranks = results_of_ranks(train_all, folder, num_ranks=NUM_RANKS)
    with group_of_one():
        return train(str(folder), rank=0, num_ranks=1), ranks


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_critic_and_policy_as_one(seen, case):
    """Fails when a rank's tokens are missing from the value loss, only one rank counts a warm-up
    step, or a row gets the advantages or teacher values of another row.
    """
    one, ranks = seen
    merged = [merge(each) for each in zip(*(rank[case]["metrics"] for rank in ranks), strict=True)]
    for expected, found in zip(one["metrics"], merged, strict=True):
        wanted = expected.read()
        assert found.read() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert "loss/teacher_kl" in wanted
    for rank in ranks:
        torch.testing.assert_close(rank[case]["logprobs"], one["logprobs"], rtol=0, atol=1e-5)
        for name, value in rank[case]["critic"].items():
            torch.testing.assert_close(value, one["critic"][name], rtol=0, atol=1e-5, msg=name)
