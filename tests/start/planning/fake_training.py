"""A step of the learner under fake tensors: torch's FSDP memory tracker compared with the memory
plan.

Run it as a program in a separate process, because it forms a process group of ranks that do not
exist: `python fake_training.py FOLDER RANKS TOKENS SHARE` prints its measurements as JSON.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from fake_attention import allocate_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from april_rl.training.learner.mesh import build_mesh
from april_rl.training.learner.model.architecture import empty_model, recompute_activations
from april_rl.training.learner.model.logprobs import LogprobHead
from april_rl.training.learner.model.sizes import BLOCK_BYTES
from april_rl.training.learner.policy import Policy


def policy_of(folder: str, *, share: float) -> Policy:
    """Return the learner's policy on the meta device, computing logits in blocks as on a GPU."""
    causal_lm = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    allocate_attention(causal_lm)
    if share:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(causal_lm, temperature=1.0)
    policy.lm_head = LogprobHead(
        policy.lm_head.weight, temperature=1.0, shape=policy.lm_head._shape, block_bytes=BLOCK_BYTES
    )
    return policy


def measure(folder: str, *, num_ranks: int, num_tokens: int, share: float) -> dict[str, float]:
    """Return bytes of one rank: the peak of a backward pass, and the weights, gradients and
    optimizer state after an optimizer step.
    """
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    mesh = build_mesh("cpu", shard_size=None)
    policy = policy_of(folder, share=share)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy.shard(mesh, compute_dtype=torch.bfloat16)
        policy._stays_gathered = False
        policy.to_empty(device=torch.device("cpu"))
        for unit in policy.modules():
            if isinstance(unit, FSDPModule):  # as on a GPU
                unit.set_reshard_after_forward(unit is not policy)
        policy.eval()
        recompute_activations(policy, share=share)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
        tokens = torch.arange(num_tokens)
        row = SimpleNamespace(
            token_ids=tokens[None],
            position_ids=tokens[None],
            packing=None,
            positions=tokens,
            labels=tokens,
        )
        policy.set_last_backward(True)
        policy(row)[0].sum().backward()
        optimizer.step()  # from here on there are optimizer state and gradients of an earlier row
        with FSDPMemTracker(policy, optimizer) as tracker:
            state = total(tracker, "current")
            policy(row)[0].sum().backward()
            backward = total(tracker, "peak")
    return {"backward": backward, "state": state}


def total(tracker: FSDPMemTracker, kind: str) -> int:
    return int(tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"])


if __name__ == "__main__":
    folder, num_ranks, num_tokens, share = sys.argv[1:]
    found = measure(
        folder, num_ranks=int(num_ranks), num_tokens=int(num_tokens), share=float(share)
    )
    print(json.dumps(found))
