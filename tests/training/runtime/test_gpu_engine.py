"""Learner and engine on one GPU: the engine sleeps during the update and wakes with the new
weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_setup import make_learner
from light_samples import make_packer
from own_process import in_own_process
from small_engine import GUESSES, request_of, small_engine
from test_weight_sync import generate
from tiny_models import write_tiny_qwen3

from april_rl.config.choices import ComputeDtype, Offload
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.learner.learner import Learner
from april_rl.training.rollout.requests import Request
from april_rl.types import ScoredGroup

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
    if dist.is_initialized():  # vLLM may have destroyed it together with its own groups
        dist.destroy_process_group()


def build(
    folder: Path, device: str, *, keeps_parked: bool = False, **settings: object
) -> tuple[Learner, VllmEngine]:
    write_tiny_qwen3(folder, hidden_size=256, num_layers=2)
    in_halves = {"compute_dtype": ComputeDtype.bfloat16, "offload": Offload.all}
    learner = make_learner(str(folder), device=device, lr=2e-2, **in_halves)
    learner.offload()
    engine = small_engine(
        folder,
        max_model_len=128,
        max_num_seqs=32,
        temperature=0.8,
        keeps_parked=keeps_parked,
        **({"dtype": ComputeDtype.bfloat16} | settings),
    )
    return learner, engine


def step(learner: Learner, engine: VllmEngine, number: int) -> float:
    """Run a whole step like a worker; return the mismatch of its samples."""
    return update(learner, engine, generate(engine, number))


def update(learner: Learner, engine: VllmEngine, groups: Sequence[ScoredGroup]) -> float:
    """Train on `groups` and give the engine the new weights; return the mismatch."""
    packer = make_packer(max_tokens=1024, max_response_tokens=40, hidden_size=256)
    advantages = [np.array([-1.0, 1.0, -1.0, 1.0])] * len(groups)
    batch = packer.pack(groups, advantages, policy_version=engine.policy_version)
    engine.sleep()
    metrics = learner.update(batch.of_rank(0)).read()
    engine.wake_weights()
    engine.load_weights(learner.weights(), policy_version=engine.policy_version + 1)
    learner.offload()
    engine.wake_kv_cache()
    return metrics["mismatch/logprob_abs_mean"]


def mismatch_of_three_steps(folder: Path, settings: dict[str, object]) -> float:
    """Return the largest mismatch, measured in a separate process."""
    with process_group():
        learner, engine = build(folder, "cuda", **settings)
        return max(step(learner, engine, number) for number in range(3))


def request(prompt_id: int, so_far: Sequence[int] = ()) -> Request:
    prompt = (5, 6, 7 + prompt_id % 80)
    return request_of(prompt_id, prompt, so_far, budget=60, seed=1000 + prompt_id)


class Kept(NamedTuple):
    """Samples that were parked while the learner updated, with their KV cache on the GPU, and then
    continued.
    """

    num_parked: int
    prefilled_tokens: int  # tokens that were prefilled when they continued
    num_kept: int
    # The same count for as many samples again, after others filled all slots of the engine.
    num_crowded_out: int
    mismatch: float  # mismatch of the next step, on the new weights


def kept_over_an_update(folder: Path) -> Kept:
    """Run a whole step with an engine that stays awake and is full of parked samples."""
    with process_group():
        learner, engine = build(folder, "cuda", keeps_parked=True, sleeps=False)
        groups = generate(engine, 0)
        engine.advance([request(9000 + i) for i in range(32)], slots=32, max_steps=8)
        parked = {c.sample_id.prompt_id: c.token_ids for c in engine.abort()}
        update(learner, engine, groups)
        on = [request(i, token_ids) for i, token_ids in parked.items()]
        first = engine.advance(on, slots=32, max_steps=1)
        rest = engine.advance([], slots=32, max_steps=10_000).finished
        engine.advance([request(9100 + i) for i in range(32)], slots=32, max_steps=8)
        crowded = {c.sample_id.prompt_id: c.token_ids for c in engine.abort()}
        mismatch = step(learner, engine, 1)  # its 32 samples use every row of the model runner
        again = [request(i, token_ids) for i, token_ids in crowded.items()]
        last = engine.advance(again, slots=32, max_steps=10_000).finished
        return Kept(
            num_parked=len(parked),
            prefilled_tokens=first.prefilled_tokens,
            num_kept=sum(completion.is_kept for completion in (*first.finished, *rest)),
            num_crowded_out=sum(not completion.is_kept for completion in last),
            mismatch=mismatch,
        )


def memory_of_a_sleep(folder: Path) -> tuple[int, int, int, int]:
    """Return bytes of the device: all, then the free ones with the engine awake, asleep, awake."""
    with process_group():
        _, engine = build(folder, "cuda")
        awake, total = torch.accelerator.get_memory_info()
        engine.sleep()
        asleep = torch.accelerator.get_memory_info()[0]
        engine.wake_weights()
        engine.wake_kv_cache()
        return total, awake, asleep, torch.accelerator.get_memory_info()[0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"args": {"speculative_config": GUESSES}}, {"args": {"async_scheduling": True}}],
    ids=["plain", "ngram", "async"],
)
def test_an_engine_that_slept_samples_with_the_weights_it_was_given(tmp_path, settings):
    """Three steps that change the weights a lot. Fails when sleep, wake or sync misses a weight, or
    speculative tokens have other log-probabilities than the model's.
    """
    assert in_own_process(mismatch_of_three_steps, tmp_path, settings) <= 0.02


def test_parked_samples_keep_their_kv_cache_during_an_update(tmp_path):
    """With engine.sleep=never and rollout.resume=keep. Fails when the update touches the engine's
    memory, a sync leaves the old weights, or parked samples hold rows that others need.
    """
    kept = in_own_process(kept_over_an_update, tmp_path)
    assert kept.prefilled_tokens == 0
    assert 0 < kept.num_kept == kept.num_parked
    assert kept.num_crowded_out > 0
    assert kept.mismatch <= 0.02


def test_a_sleeping_engine_frees_its_memory(tmp_path):
    """Weights and KV cache take most of a fifth of the device."""
    total, awake, asleep, again = in_own_process(memory_of_a_sleep, tmp_path)
    assert asleep - awake > 0.15 * total
    assert again == pytest.approx(awake, abs=0.5 * GIB)
