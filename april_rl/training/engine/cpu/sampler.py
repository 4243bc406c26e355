"""Sampling of vLLM on CPU: noise that depends on seed and position only.

Legend: [B] rows of an engine step, one per request. [V] vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import WorkerWrapperBase

from april_rl.training.rollout.requests import Sampling

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014, fig. 17.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# Keys of a request's `extra_args`: its seed, and its `Sampling` if it differs from training.
SEED, SAMPLING = "seed", "sampling"
_FIRST_TOP_K = 1024  # a nucleus rarely has more tokens


def noise_seeds(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return output number `positions` of SplitMix64 generators started at `seeds`, [B] each.

    The result depends on these two numbers only, not on the other rows of the step, nor on how many
    steps came before.
    """
    state = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed.view(np.int64)


def gumbel_argmax(logprobs: torch.Tensor, seeds: NDArray[np.int64]) -> torch.Tensor:
    """Draw a token [B], int64, per row of the distribution `logprobs` [B, V] (Gumbel-max trick)."""
    tokens: torch.Tensor = torch.ops._C.fused_gumbel_argmax(logprobs, torch.from_numpy(seeds))
    return tokens


def nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return `logprobs` [B, V] with -inf for the tokens outside each row's nucleus.

    The nucleus is the smallest set of most probable tokens whose probability is at least `top_p`
    [B] (Holtzman et al. 2020, section 3.1). The rest is not renormalised.
    """
    bound = top_p.double()[:, None]
    vocabulary = logprobs.shape[-1]
    for count in (min(_FIRST_TOP_K, vocabulary), vocabulary):
        ordered, order = logprobs.topk(count, dim=-1)
        probabilities = ordered.double().exp()
        total = probabilities.cumsum(dim=-1)
        if bool((total[:, -1:] >= bound).all()):
            break
    is_outside = total - probabilities >= bound  # more probable tokens suffice
    nothing = torch.full_like(logprobs, -torch.inf)
    return nothing.scatter_(-1, order, ordered.masked_fill(is_outside, -torch.inf))


class CounterSampler(Sampler):
    """Samples at one temperature and reports the sampled token's log-probability.

    vLLM's own sampler draws from each request's generator in Python, and cannot do that for a
    prompt that is prefilled in several steps. A request's `extra_args` hold its seed, and its
    own `Sampling` if it has one; this does not change how the other rows are computed.
    """

    def __init__(self, runner: CPUModelRunner, *, temperature: float) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner, self._temperature = runner, temperature

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,  # noqa: ARG002
        predict_bonus_token: bool = False,  # noqa: ARG002
        logprobs_mode_override: str | None = None,  # noqa: ARG002
    ) -> SamplerOutput:
        """Return a token of every row of `logits` [B, V] and its log-probability in nats."""
        arguments = self._row_arguments(len(logits))
        own = [row for row, given in enumerate(arguments) if SAMPLING in given]
        own_logits = logits[own] if own else None  # a copy, as the next lines overwrite logits
        scaled = logits.to(torch.float32).div_(self._temperature)
        logprobs = scaled.log_softmax(dim=-1)
        if own_logits is not None:
            logprobs[own] = _own_logprobs(own_logits, [arguments[row][SAMPLING] for row in own])
        tokens = gumbel_argmax(logprobs, self._row_seeds(arguments))[:, None]  # [B, 1]
        tokens_32 = tokens.to(torch.int32)
        return SamplerOutput(
            sampled_token_ids=tokens_32,
            logprobs_tensors=LogprobsTensors(
                logprob_token_ids=tokens_32,
                logprobs=logprobs.gather(-1, tokens),
                selected_token_ranks=torch.zeros(len(tokens), dtype=torch.int32),
            ),
        )

    def _row_arguments(self, num_rows: int) -> list[dict[str, Any]]:
        requests = self._runner.requests
        rows = self._runner.input_batch.req_ids[:num_rows]
        return [requests[row].sampling_params.extra_args for row in rows]  # type: ignore[union-attr, misc]

    def _row_seeds(self, arguments: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
        seeds = np.array([given[SEED] for given in arguments], dtype=np.int64)
        positions = self._runner.input_batch.num_tokens_no_spec[: len(arguments)]
        return noise_seeds(seeds, positions)


def _own_logprobs(logits: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Return the log-probabilities from which rows of `logits` [B, V] are drawn, each with its own
    `Sampling`: -inf outside the nucleus and renormalised inside.
    """
    temperatures = torch.tensor([each.temperature for each in sampling])
    logprobs = (logits.to(torch.float32) / temperatures[:, None]).log_softmax(dim=-1)
    cut = [row for row, each in enumerate(sampling) if each.top_p < 1]
    top_p = torch.tensor([sampling[row].top_p for row in cut])
    logprobs[cut] = nucleus(logprobs[cut], top_p).log_softmax(dim=-1)
    return logprobs


def install_counter_sampler(worker: WorkerWrapperBase, *, temperature: float) -> None:
    """Make vLLM's `worker` sample with a `CounterSampler`."""
    runner: CPUModelRunner = worker.model_runner
    runner.sampler = CounterSampler(runner, temperature=temperature)
