"""Adapters on real vLLM: the engine samples with the merged weights, the learner computes with A
and B.
"""

import pytest
import torch
import torch.distributed as dist
from test_weight_sync import build, train
from tiny_models import write_tiny_qwen3

from april_rl.config.lora import LoraConfig
from april_rl.training.learner.update_errors import MismatchError

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
LORA = LoraConfig(rank=8, alpha=16.0)


def test_an_engine_agrees_with_merged_adapters_and_stops_the_run_without_them(tmp_path):
    """The steps are as large as in the test of whole weights. The engine's weights are rounded
    after the sum and the learner's before it, so the mismatch is larger than with one set of
    bfloat16 weights.
    """
    write_tiny_qwen3(tmp_path, tied=False, hidden_size=64, num_layers=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    learner, engine = build(str(tmp_path), lora=LORA)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    mismatches = train(learner, engine, sync=True)
    print("mismatch in nats at the start and after one and two steps:", mismatches)
    assert max(mismatches) <= 0.02
    moved = [n for n, t in learner.weights() if not torch.equal(t, before[n])]
    assert len(moved) == 2 * 7, moved
    with pytest.raises(MismatchError, match="sync"):
        train(learner, engine, sync=False)
