"""The learner alone: an optimizer step over packed rows, and moving its state to the host and back.

Settings are those of the recipe tiny_cpu with another model, taken through the same builders as in
a run. Response lengths follow a lognormal distribution.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench.modes import Prompts
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import AutoConfig

from acceptance.device import name_of, product_tflops, sheet_tflops, this_device, time_work
from april_rl.config import TrainConfig
from april_rl.config.store import compose_overrides, to_config
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.start.assembly.packer import build_packer
from april_rl.start.planning.layout import settle
from april_rl.start.planning.machine import num_gpus
from april_rl.start.planning.model import read_model
from april_rl.training.algorithm.advantages import credits_of
from april_rl.training.batch.packing import MicroBatch
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.runtime.worker_parts import build_learner
from april_rl.types import Completion, Group, Prompt, Sample, ScoredGroup

GROUP_SIZE = 8
_ROUNDS = 3


def measure(
    settings: Sequence[str], num_groups: int, median_tokens: float, cache: str = ""
) -> dict[str, Any]:
    """Measure a first optimizer step with its memory on an accelerator, later ones, and moving
    weights and optimizer state to the host and back. Compiled code goes to `cache`, if given.
    """
    device = this_device()
    if cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
    with open_learner(settings) as (config, learner):
        rows = _rows(config, num_groups, median_tokens)
        first_s = time_work(lambda: learner.update([rows]), device)
        peak = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated()
        seconds = median(time_work(lambda: learner.update([rows]), device) for _ in range(_ROUNDS))
        learner.offload()  # the first offload allocates host memory
        back_s, to_host_s = [], []
        for _ in range(_ROUNDS):
            back_s.append(time_work(learner.reload, device))
            to_host_s.append(time_work(learner.offload, device))
    tflops = step_flops(AutoConfig.from_pretrained(config.model.path), rows) / seconds / 1e12
    return {
        "first_s": first_s,
        "time_s": seconds,
        "tokens_per_s": sum(len(row.token_ids) for row in rows) / seconds,
        "tflops": tflops,
        "sheet_tflops": sheet_tflops(name_of(device)),
        "product_tflops": product_tflops(device),
        "peak_gib": peak / 2**30,
        "gib": model_sizes(read_model(config.model.path), config.lora).num_parameters * 12 / 2**30,
        "to_host_s": median(to_host_s),
        "back_s": median(back_s),
    }


def step_flops(model: Any, rows: Sequence[MicroBatch]) -> float:  # noqa: ANN401 - a configuration
    """Return the model FLOPs of an optimizer step (PaLM, arXiv 2204.02311, appendix B): what the
    mathematics asks for, without recomputation; attention is causal, so half of all pairs count.
    """
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    of_heads = 2 * (heads + model.num_key_value_heads) * model.head_dim
    layer = model.hidden_size * (of_heads + 3 * model.intermediate_size)
    tokens = sum(len(row.token_ids) for row in rows)
    responses = sum(int(row.response_mask.sum()) for row in rows)
    pairs = sum(length**2 for row in rows for length in row.lengths)
    of_head = model.vocab_size * model.hidden_size * responses
    return 6.0 * (layers * layer * tokens + of_head + layers * heads * model.head_dim * pairs)


@contextmanager
def open_learner(settings: Sequence[str]) -> Iterator[tuple[TrainConfig, Learner]]:
    """Build the learner in a `torch.distributed` process group with this process alone."""
    # No engine sampled these samples, so their log-probabilities are far from the learner's.
    unchecked = "learner.max_mismatch=100"
    overrides = ["+recipe=tiny_cpu", "runtime.device=auto", "optimizer.lr=1e-8", unchecked]
    overrides += settings
    config = to_config(compose_overrides(overrides))
    config = settle(config, gpus=num_gpus(), where="this machine")[0]
    device = this_device()
    backend = "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield config, build_learner(config, device=device.type)[0]
    finally:
        if dist.is_initialized():  # an engine beside the learner has destroyed it
            dist.destroy_process_group()


def _rows(config: TrainConfig, num_groups: int, median_tokens: float) -> list[MicroBatch]:
    """Return the micro-batches of one optimizer step on one rank: random samples, packed."""
    model = AutoConfig.from_pretrained(config.model.path)
    prompts = Prompts(model.vocab_size)
    lengths = Lognormal(median_tokens=median_tokens, sigma=1.0)
    max_tokens = config.rollout.max_response_tokens

    def tokens(sample: Sample) -> tuple[int, ...]:
        rng = np.random.default_rng([*sample.id])
        return tuple(
            rng.integers(4, model.vocab_size, min(lengths(sample.id), max_tokens)).tolist()
        )

    groups = [_group(prompts.take(), tokens) for _ in range(num_groups)]
    estimator = credits_of(config.algorithm.advantage, config.reward)
    advantages = estimator(groups, [group.rewards for group in groups])
    packer = build_packer(config, num_ranks=1, hidden_size=model.hidden_size)
    [rows] = packer.pack(groups, advantages, policy_version=0).of_rank(0)
    return list(rows)


def _group(prompt: Prompt, tokens: Callable[[Sample], tuple[int, ...]]) -> ScoredGroup:
    samples = []
    for i in range(GROUP_SIZE):
        sample = Sample(prompt=prompt, index=i)
        token_ids = tokens(sample)
        completion = Completion(
            sample_id=sample.id,
            start=0,
            policy_version=0,
            context_version=0,
            token_ids=token_ids,
            logprobs=(-10.0,) * len(token_ids),
            finish_reason="stop",
        )
        samples.append(sample.with_span(completion))
    rewards = tuple(float(i % 2) for i in range(GROUP_SIZE))
    return ScoredGroup(group=Group(prompt=prompt, samples=tuple(samples)), rewards=rewards)
