"""An engine beside a learner in one process: speeds of decoding and prefill, the parts of a weight
sync, and the memory that a sleeping engine keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from acceptance.device import name_of, this_device, time_work
from acceptance.learner import open_learner
from april_rl.config import TrainConfig
from april_rl.start.planning.model import read_model
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.rollout.requests import Request
from april_rl.types import SampleId

_NUM_SYNCS, _NUM_TICKS, _STEPS = 4, 3, 8  # the last one: engine steps in a tick
_SHORT = 8  # tokens of a short prompt


def measure(settings: Sequence[str], context: int, batch: int) -> dict[str, Any]:
    """Return the speeds; `context` tokens fit a sample, and `batch` samples are decoded together.

    Decoding is measured twice: one sample with a short context, whose step reads the weights, and a
    full batch with long contexts. The second takes longer because of its keys and values.
    """
    device = this_device()
    with open_learner(settings) as (config, learner):
        model = model_sizes(read_model(config.model.path), config.lora)
        learner.offload()
        before = _used_bytes(device)
        engine = _engine(config, context=context, batch=batch)
        work = _Work(engine, AutoConfig.from_pretrained(config.model.path).vocab_size)
        long = context - 2 * _STEPS * (_NUM_TICKS + 2)  # the remaining tokens are decoded
        work.prefill(1, context // 2)  # a warm-up
        tokens_per_s = work.prefill(batch, context // 2)
        small_s, large_s = work.decode(1, _SHORT), work.decode(batch, long)
        engine.sleep()
        asleep = _used_bytes(device) - before
        syncs = [_sync(learner, engine, version) for version in range(1, _NUM_SYNCS + 1)]
        engine.close()
    cache, weights = 2 * model.kv_numbers * (batch * long - _SHORT), syncs[-1]["bytes"]
    rate = cache / (large_s - small_s) if large_s > small_s else weights / small_s
    # Otherwise the weights alone would take longer than the step.
    rate = max(rate, weights / small_s)
    return {
        "device": name_of(device),
        "decode_bytes_per_s": rate,
        "between_steps_s": small_s - weights / rate,
        "prefill_flops_per_s": 2 * model.num_parameters * tokens_per_s,
        "asleep_gib": max(0, asleep) / 2**30,
        # The first sync of a process prepares vLLM's loaders.
        "sync": {key: median(each[key] for each in syncs[1:]) for key in syncs[0]},
    }


def _engine(config: TrainConfig, *, context: int, batch: int) -> VllmEngine:
    return VllmEngine(
        config.engine,
        model_path=config.model.path,
        seed=0,
        temperature=1.0,
        max_model_len=context,
        max_num_seqs=batch,
        keeps_parked=False,
        sleeps=True,
        stop_tokens=(),
    )


class _Work:
    """Random requests, each with a prompt of its own."""

    def __init__(self, engine: VllmEngine, vocabulary: int) -> None:
        """Use `engine`, whose model has `vocabulary` tokens."""
        self._engine, self._vocabulary = engine, vocabulary
        self._num_requests = 0

    def prefill(self, num_samples: int, length: int) -> float:
        """Return prefilled tokens per second."""
        requests = [self._request(length, max_tokens=1) for _ in range(num_samples)]
        tick = self._engine.advance(requests, slots=num_samples, max_steps=num_samples * length)
        return tick.prefilled_tokens / tick.elapsed_s

    def decode(self, num_samples: int, length: int) -> float:
        """Return the seconds of a step that samples a token of each sample."""
        most = _STEPS * (_NUM_TICKS + 2)
        requests = [self._request(length, max_tokens=most) for _ in range(num_samples)]
        seconds: list[float] = []
        while len(seconds) < _NUM_TICKS:
            tick = self._engine.advance(requests, slots=num_samples, max_steps=_STEPS)
            requests = []
            if not tick.engine_steps:
                raise ValueError(
                    f"{num_samples} samples of {length} tokens do not fit the KV cache"
                )
            if tick.slot_steps == num_samples * _STEPS and not tick.prefilled_tokens:
                seconds.append(tick.elapsed_s / _STEPS)
        self._engine.abort()
        return median(seconds)

    def _request(self, length: int, *, max_tokens: int) -> Request:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        ids = np.random.default_rng(number).integers(4, self._vocabulary, length).tolist()
        return Request(
            sample_id=SampleId(number, 0),
            prompt_token_ids=tuple(ids),
            start=0,
            max_tokens=max_tokens,
            seed=number,
        )


class _Timed:
    """Weights of the learner, with the seconds that gathering and casting them has taken."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.seconds, self.num_bytes = 0.0, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        found: list[tuple[str, Tensor] | None] = []
        device = this_device()
        self.seconds += time_work(lambda: found.append(next(self._weights, None)), device)
        if found[0] is None:
            raise StopIteration
        self.num_bytes += found[0][1].nbytes
        return found[0]


def _sync(learner: Learner, engine: VllmEngine, version: int) -> dict[str, float]:
    """Return bytes and the seconds of each part of a weight sync, in their order."""
    device = this_device()
    engine.sleep()
    wake_s = time_work(engine.wake_weights, device)
    timed = _Timed(learner.weights())
    both_s = time_work(lambda: engine.load_weights(timed, policy_version=version), device)
    return {
        "wake_s": wake_s,
        "gather_s": timed.seconds,
        "load_s": both_s - timed.seconds,
        "offload_s": time_work(learner.offload, device),
        "wake_cache_s": time_work(engine.wake_kv_cache, device),
        "bytes": timed.num_bytes,
    }


def _used_bytes(device: torch.device) -> int:
    """Return the memory of an accelerator that all processes use; 0 on CPU."""
    if device.type == "cpu":
        return 0
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info()
    return total - free
