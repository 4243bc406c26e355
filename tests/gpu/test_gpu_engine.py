"""Learner and engine on one GPU: asleep during the update, awake with the new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_setup import make_learner
from own_process import in_own_process
from test_weight_sync import generate
from tiny_models import write_tiny_qwen3

from april_rl.algorithm.age import age_weights, decay
from april_rl.algorithm.aggregation import token_mean
from april_rl.batch.packing import Packer
from april_rl.engine.options import EngineOptions
from april_rl.engine.vllm_engine import VllmEngine
from april_rl.learner.learner import Learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="needs a GPU: torch.accelerator finds none"
    ),
]
GIB = 2**30


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():  # vLLM may have ended it with its own
        dist.destroy_process_group()


def build(folder: Path, device: str, **options: object) -> tuple[Learner, VllmEngine]:
    write_tiny_qwen3(folder, hidden_size=256, num_layers=2)
    learner = make_learner(
        str(folder), device=device, compute_dtype="bfloat16", offload="all", lr=2e-2
    )
    learner.offload()
    engine = VllmEngine(
        model_path=str(folder),
        seed=0,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=32,
        max_batched_tokens=1024,
        kv_cache_gib=0.25,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        temperature=0.8,
        options=EngineOptions(**options),  # type: ignore[arg-type]
    )
    return learner, engine


def step(learner: Learner, engine: VllmEngine, number: int) -> float:
    """A whole step as a worker makes it; the mismatch of what the engine sampled in it."""
    packer = Packer(
        num_ranks=1,
        max_tokens=1024,
        num_minibatches=1,
        max_staleness=0,
        max_response_tokens=40,
        age_weights=partial(age_weights, weight_of_age=decay(1.0)),
        aggregation=token_mean,
        hidden_size=256,
    )
    groups = generate(engine, number)
    advantages = [np.array([-1.0, 1.0, -1.0, 1.0])] * len(groups)
    batch = packer.pack(groups, advantages, policy_version=engine.policy_version)
    engine.sleep()
    metrics = learner.update(batch.of_rank(0)).read()
    engine.wake_weights()
    engine.load_weights(learner.weights(), policy_version=engine.policy_version + 1)
    learner.offload()
    engine.wake_kv_cache()
    return metrics["mismatch/logprob_abs_mean"]


def mismatch_of_three_steps(folder: Path, options: dict[str, object]) -> float:
    """The largest, of a process of its own."""
    with process_group():
        learner, engine = build(folder, "cuda", **options)
        return max(step(learner, engine, number) for number in range(3))


def memory_of_a_sleep(folder: Path) -> tuple[int, int, int, int]:
    """Bytes: the device's, free when awake, asleep, and awake again."""
    with process_group():
        _, engine = build(folder, "cuda")
        awake, total = torch.accelerator.get_memory_info()
        engine.sleep()
        asleep = torch.accelerator.get_memory_info()[0]
        engine.wake_weights()
        engine.wake_kv_cache()
        return total, awake, asleep, torch.accelerator.get_memory_info()[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"speculation": "ngram"}, {"async_scheduling": True}],
    ids=["plain", "ngram", "async"],
)
def test_an_engine_that_slept_samples_with_the_weights_it_was_given(tmp_path, options):
    """Three steps that move the weights far. Fails when sleep, wake or sync leaves one behind, or
    guessed tokens come with other log-probabilities than the model's.
    """
    assert in_own_process(mismatch_of_three_steps, tmp_path, options) <= 0.02


def test_a_sleeping_engine_gives_its_memory_back(tmp_path):
    """Weights and KV cache: most of a fifth of the device."""
    total, awake, asleep, again = in_own_process(memory_of_a_sleep, tmp_path)
    assert asleep - awake > 0.15 * total
    assert again == pytest.approx(awake, abs=0.5 * GIB)
