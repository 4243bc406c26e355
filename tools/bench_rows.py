"""Packed rows of random samples as a run would train them, and a learner to train them with.

Settings are those of a recipe, taken through the same builders as in a run. Response lengths follow
a lognormal distribution. Behaviour log-probabilities are the learner's own, somewhat off, as an
engine's are; the learning rate is next to nothing, so that they stay so over many updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from bench_modes import CappedLognormal
from hydra import compose, initialize_config_dir

from april_rl.algorithm.advantages import ADVANTAGES
from april_rl.assembly.packer import build_packer
from april_rl.batch.packing import MicroBatch
from april_rl.config import TrainConfig, config_dir, register, to_config
from april_rl.learner.learner import Learner
from april_rl.runtime.layout import settle
from april_rl.runtime.preflight import num_gpus
from april_rl.types import Completion, Group, Prompt, Sample, SampleId, ScoredGroup

_LR = 1e-8
_NOISE_NATS = 0.01  # of the engine's log-probabilities
_FIRST_TOKEN = 4  # the ones before it may mean something
_VERSION = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one update trains."""

    num_groups: int
    group_size: int
    prompt_tokens: int
    length_of: CappedLognormal  # of responses


def load_config(folder: Path, *overrides: str) -> TrainConfig:
    """Return the recipe `tiny_cpu`, settled for this machine, with another model and a learning
    rate so small that nothing changes.
    """
    register()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        settings = [
            *("+recipe=tiny_cpu", f"model.path={folder}", f"optimizer.lr={_LR}"),
            *("trainer.num_steps=1000000", "runtime.device=auto", *overrides),
        ]
        config = to_config(compose("train", settings))
    return settle(config, gpus=num_gpus(), where="this machine")[0]


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Create a `torch.distributed` process group with this process alone."""
    backend = "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if dist.is_initialized():  # an engine that is given up ends it too
            dist.destroy_process_group()


def make_rows(
    config: TrainConfig, learner: Learner, work: Work, *, vocabulary: int, hidden_size: int
) -> list[MicroBatch]:
    """Return the micro-batches of one optimizer step on one rank."""
    groups = [_group(number, work, vocabulary) for number in range(work.num_groups)]
    rewards = [group.rewards for group in groups]
    advantages = ADVANTAGES[config.algorithm.advantage](rewards)
    packer = build_packer(config, num_ranks=1, hidden_size=hidden_size)
    batch = packer.pack(groups, advantages, policy_version=_VERSION)
    [rows] = batch.of_rank(0)
    return [_with_behaviour(row, learner) for row in rows]


def num_tokens(rows: Sequence[MicroBatch]) -> int:
    """Return the number of prompt and response tokens."""
    return sum(len(row.token_ids) for row in rows)


def _group(number: int, work: Work, vocabulary: int) -> ScoredGroup:
    rng = np.random.default_rng((number, 7))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(_FIRST_TOKEN, vocabulary, count).tolist())

    prompt = Prompt(
        id=number,
        token_ids=tokens(work.prompt_tokens),
        text="",
        answer="",
        source=f"random:{number}",
    )
    samples = [Sample(prompt=prompt, index=i) for i in range(work.group_size)]
    finished = tuple(s.extended(_completion(tokens(work.length_of(s.id)), s.id)) for s in samples)
    rewards = tuple(float(i < work.group_size // 2) for i in range(work.group_size))
    return ScoredGroup(group=Group(prompt=prompt, samples=finished), rewards=rewards)


def _completion(token_ids: tuple[int, ...], sample_id: SampleId) -> Completion:
    return Completion(
        sample_id=sample_id,
        start=0,
        policy_version=_VERSION,
        context_version=_VERSION,
        token_ids=token_ids,
        logprobs=(0.0,) * len(token_ids),
        finish_reason="stop",
    )


def _with_behaviour(row: MicroBatch, learner: Learner) -> MicroBatch:
    logprobs = learner.logprobs(row).cpu().numpy()
    noise = np.random.default_rng(len(row.token_ids)).normal(scale=_NOISE_NATS, size=len(logprobs))
    behaviour = np.where(row.response_mask, logprobs + noise, 0)
    return replace(row, behaviour_logprobs=behaviour.astype(np.float32))
