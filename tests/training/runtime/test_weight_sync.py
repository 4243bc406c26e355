"""The mismatch check on real vLLM and the real learner must detect a missing sync."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_setup import NO_ADAPTERS, make_learner
from light_samples import make_packer
from small_engine import small_engine
from tiny_models import write_tiny_qwen3, write_tiny_qwen3_moe
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)

from april_rl.config.choices import ComputeDtype, LoraSync, Offload
from april_rl.config.lora import LoraConfig
from april_rl.run.supervision.heartbeat import Heartbeat
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.update_errors import MismatchError
from april_rl.training.rollout.requests import Request
from april_rl.training.runtime.weight_sync import send_adapter, send_weights
from april_rl.types import Group, Prompt, Sample, SampleId, ScoredGroup

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
GROUP_SIZE = 4
Send = Callable[..., int]


MODELS = {
    "tied": partial(write_tiny_qwen3, tied=True),
    "untied": partial(write_tiny_qwen3, tied=False),
    "experts": write_tiny_qwen3_moe,
}


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    destroy_model_parallel()  # engines with experts have more groups
    destroy_distributed_environment()


@pytest.fixture(params=[pytest.param("tied", marks=pytest.mark.soak), "untied", "experts"])
def model_path(request, tmp_path, _group) -> str:
    MODELS[request.param](tmp_path)
    return str(tmp_path)


def build(
    model_path: str, *, lora: LoraConfig = NO_ADAPTERS, dtype: ComputeDtype = ComputeDtype.bfloat16
) -> tuple[Learner, VllmEngine]:
    learner = make_learner(
        model_path,
        lora=lora,
        compute_dtype=dtype,
        offload=Offload.all,
        lr=2e-2,
        betas=[0.9, 0.999],
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    engine = small_engine(
        model_path,
        max_model_len=128,
        max_num_seqs=32,
        temperature=0.8,
        dtype=dtype,
        lora=lora if lora.sync is LoraSync.adapter else None,
    )
    return learner, engine


def generate(engine: VllmEngine, step: int) -> list[ScoredGroup]:
    prompts = [
        Prompt(id=100 * step + i, token_ids=(5, 6, 7 + i), text="", answer="", source="test")
        for i in range(8)
    ]
    requests = [
        Request(
            sample_id=SampleId(prompt.id, j),
            prompt_token_ids=prompt.token_ids,
            start=0,
            max_tokens=40,
            seed=1000 * prompt.id + j,
        )
        for prompt in prompts
        for j in range(GROUP_SIZE)
    ]
    tick = engine.advance(requests, slots=32, max_steps=10_000)
    done = {completion.sample_id: completion for completion in tick.finished}
    return [
        ScoredGroup(
            group=Group(
                prompt=prompt,
                samples=tuple(
                    Sample(prompt=prompt, index=j, spans=(done[SampleId(prompt.id, j)],))
                    for j in range(GROUP_SIZE)
                ),
            ),
            rewards=(0.0, 1.0, 0.0, 1.0),
        )
        for prompt in prompts
    ]


def train(
    learner: Learner, engine: VllmEngine, *, sync: bool, send: Send = send_weights
) -> list[float]:
    packer = make_packer(max_tokens=1024, max_response_tokens=40)
    mismatches = []
    for step in range(3):
        groups = generate(engine, step)
        advantages = [np.array([-1.0, 1.0, -1.0, 1.0])] * len(groups)
        batch = packer.pack(groups, advantages, policy_version=engine.policy_version)
        metrics = learner.update(batch.of_rank(0))
        mismatches.append(metrics.read()["mismatch/logprob_abs_mean"])
        if sync:
            send(learner, engine, Heartbeat(), version=step + 1)
            learner.offload()
    return mismatches


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("keeps_weights", [True, False])
def test_an_engine_with_only_the_adapter_agrees_with_the_learner(
    tmp_path, monkeypatch, keeps_weights
):
    """Even an engine that lost the frozen weights in its sleep and gets them again. Fails when the
    adapter is an older one, has another scale, or is added to weights that already contain it.
    """
    write_tiny_qwen3(tmp_path, tied=True)
    lora = LoraConfig(rank=4, alpha=16.0, sync=LoraSync.adapter)
    learner, engine = build(str(tmp_path), lora=lora, dtype=ComputeDtype.float32)
    monkeypatch.setattr(VllmEngine, "keeps_weights", keeps_weights)
    adapter_bytes = sum(p.numel() for p in learner._policy.trained_parameters()) * 4
    sent = send_adapter(learner, engine, Heartbeat(), version=0)
    assert (sent == adapter_bytes) is keeps_weights
    assert max(train(learner, engine, sync=True, send=send_adapter)) <= 2e-6
    merged = dict(learner.weights())
    assert any(
        not torch.equal(tensor, merged[name]) for name, tensor in learner.weights(merged=False)
    )


def test_a_synced_engine_agrees_with_the_learner_and_an_unsynced_one_stops_the_run(model_path):
    """Large steps make old weights very different from new ones. Fails when the check compares
    nothing.
    """
    learner, engine = build(model_path)
    assert max(train(learner, engine, sync=True)) <= 0.02

    before = {name: tensor.clone() for name, tensor in learner.weights()}
    with pytest.raises(MismatchError, match="sync"):
        train(learner, engine, sync=False)
    assert any((before[n] != t).any() for n, t in learner.weights()), "the first step was legal"
