"""LoRA adapters on two ranks, sharded and copied, against plain torch with peft."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import results_of_ranks
from learner_setup import (
    ALGORITHM,
    group_of_one,
    make_examples,
    make_learner,
    num_tokens,
    pack,
    plain_logprobs,
    write_model,
)
from test_learner_lora import LORA, in_peft, matrices

from april_rl.config.choices import Kl
from april_rl.training.batch.packing import MicroBatch
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.row import PackedRow

pytestmark = pytest.mark.slow
NUM_RANKS = 2
KL = replace(ALGORITHM, kl=Kl.k3, kl_coefficient=0.1)
# With one row in A, the second rank holds no part of A; with copies there are two mesh dimensions.
CASES: dict[str, dict[str, Any]] = {
    "sharded": {"lora": LORA, "activation_checkpointing": True},
    "one_row": {"lora": replace(LORA, rank=1)},
    "copied": {"lora": LORA, "shard_size": 1},
}


def uneven_rows(path: str, *, noise: float, age: int, rank: int) -> list[MicroBatch]:
    """Return five of six examples in two rows for the first rank; one example and the dummy row for
    the other.
    """
    examples = make_examples(path, noise=noise, age=age)
    bins = [examples[:2], examples[2:5]] if rank == 0 else [examples[5:], []]
    return [pack(bin_, total=num_tokens([examples])) for bin_ in bins]


def gradients(learner: Learner, path: str, *, rank: int) -> dict[str, torch.Tensor]:
    """Return the gradients of Σ advantage · logprob over the examples of both ranks."""
    rows = uneven_rows(path, noise=0.0, age=0, rank=rank)
    for number, micro_batch in enumerate(rows, start=1):
        learner._policy.set_last_backward(number == len(rows))
        row = PackedRow.of(micro_batch, device=torch.device("cpu"))
        logprobs, _ = learner._policy(row)
        ((logprobs * row.credits).sum() * NUM_RANKS).backward()
    named = learner._policy.named_parameters()
    return {name: p.grad.full_tensor() for name, p in named if p.grad is not None}


def run(path: str, settings: dict[str, Any], *, rank: int, target: Path) -> dict[str, Any]:
    """Run an update on one rank; return the gradients after it as well."""
    learner = make_learner(path, algorithm=KL, **settings)
    start = matrices(learner)
    learner.update([uneven_rows(path, noise=0.3, age=1, rank=rank)])
    learner.export(target)
    sent = {name: tensor.clone() for name, tensor in learner.weights()}
    return {"start": start, "sent": sent, "grads": gradients(learner, path, rank=rank)}


def run_all(rank: int, folder: str) -> dict[str, Any]:
    return {
        name: run(f"{folder}/model", settings, rank=rank, target=Path(folder, name))
        for name, settings in CASES.items()
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "model", tied=False)
    return folder, results_of_ranks(run_all, folder, num_ranks=NUM_RANKS)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_start_with_the_adapters_of_one_rank(seen, case):
    folder, ranks = seen
    with group_of_one():
        expected = matrices(
            make_learner(str(folder / "model"), **CASES[case] | {"shard_size": None})
        )
    for rank in ranks:
        assert all(torch.equal(rank[case]["start"][name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", CASES)
def test_two_uneven_ranks_have_the_gradients_of_plain_torch_and_peft(seen, case):
    folder, ranks = seen
    path = str(folder / "model")
    model = in_peft(path, folder / case)
    for example in make_examples(path, noise=0.0, age=0):
        (plain_logprobs(model, example).sum() * example.advantage).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        for rank in ranks:
            grad = rank[case]["grads"].pop(name.removeprefix("base_model.model."))
            error = (grad - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (name, error)
    assert not any(rank[case]["grads"] for rank in ranks)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_send_the_merged_weights(seen, case):
    """Compared with peft's own merge. Fails when rows of B are multiplied into the
    wrong rows of W.
    """
    folder, ranks = seen
    first, second = (rank[case]["sent"] for rank in ranks)
    merged = in_peft(str(folder / "model"), folder / case).merge_and_unload()
    named = dict(merged.named_parameters())
    assert first.keys() == second.keys() == named.keys()
    for name, parameter in named.items():
        assert torch.equal(first[name], second[name]), name
        assert torch.isclose(first[name], parameter, rtol=1e-5, atol=1e-7).all(), name
