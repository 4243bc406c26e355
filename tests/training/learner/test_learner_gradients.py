"""Gradients that are sharded over ranks: what a backward pass leaves in memory when it is not the
last one of its minibatch.

The other ranks are not real, so the numbers computed with their weights mean nothing.
"""

import pytest
import torch
import torch.distributed as dist
from learner_setup import CPU, build_policy, make_examples, pack
from torch.distributed.tensor import DTensor

from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow


def one_more_pass(policy: Policy, row: PackedRow, *, is_last: bool) -> None:
    policy.set_last_backward(is_last)
    torch.autograd.backward(policy(row)[0].sum())


@pytest.mark.parametrize(
    ("num_ranks", "shard_size", "is_shared_out"), [(2, 2, True), (1, 1, False), (3, 1, False)]
)
def test_no_backward_pass_leaves_more_than_a_shard_of_the_gradients(
    path, num_ranks, shard_size, is_shared_out
):
    """Where weights are sharded, so are gradients after the first of several passes. Fails when
    FSDP2 reduces gradients only after the last pass: every rank then holds float32 gradients of all
    parameters. A rank with a whole copy of the weights holds them anyway, and reduces them once.
    """
    row = PackedRow.of(pack(make_examples(path, noise=0.0, age=0), total=1), device=CPU)
    dist.init_process_group("fake", rank=0, world_size=num_ranks)
    try:
        policy = build_policy(path, shard_size=shard_size)
        shards = policy.trained_parameters()  # a pass gathers them
        one_more_pass(policy, row, is_last=False)
        first = [shard.grad for shard in shards]
        one_more_pass(policy, row, is_last=True)
        last = [shard.grad for shard in shards]
    finally:
        dist.destroy_process_group()
    kind = DTensor if is_shared_out else type(None)
    assert all(isinstance(grad, kind) for grad in first)
    assert all(isinstance(grad, DTensor) for grad in last)
