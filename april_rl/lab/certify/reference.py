"""The model in transformers: one sequence at a time, on the CPU, with plain attention.

Legend: [R] response tokens of a sample, [V] vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from april_rl.types import Sample


class Distance(NamedTuple):
    """How far two series of log-probabilities are apart, in nats."""

    mean: float
    largest: float

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, largest {self.largest:.2g} nats"


class Reference:
    """A folder's model as transformers computes it, at the sampling temperature."""

    def __init__(self, path: str, *, dtype: torch.dtype, temperature: float) -> None:
        disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        self._temperature = temperature

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probabilities of each response [R]."""
        return [self._logprobs(sample) for sample in samples]

    def gradients(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return the gradient of the sum of all log-probabilities, by parameter."""
        for sample in samples:
            torch.autograd.backward(self._logprobs(sample).sum())
        found = self._model.named_parameters()
        return {name: each.grad for name, each in found if each.grad is not None}

    @torch.no_grad()
    def num_not_greedy(self, samples: Sequence[Sample], *, tie: float) -> int:
        """Return how many response tokens are less likely than another one by more than `tie`."""
        behind = (self._all(s).max(-1).values - self._logprobs(s) for s in samples)
        return sum(int((each > tie).sum()) for each in behind)

    def _logprobs(self, sample: Sample) -> Tensor:
        labels = torch.tensor(sample.token_ids.tolist())
        return self._all(sample).gather(-1, labels[:, None])[:, 0]

    def _all(self, sample: Sample) -> Tensor:
        """Return the log-probabilities of all tokens at each place of the response [R, V]."""
        token_ids = torch.tensor([sample.sequence.tolist()])
        logits = self._model(input_ids=token_ids, use_cache=False).logits[0]
        start = len(sample.prompt.token_ids) - 1
        logprobs: Tensor = (logits[start:-1] / self._temperature).log_softmax(-1)
        return logprobs


def expect(
    samples: Sequence[Sample], load: Callable[..., Reference], *, compute: torch.dtype
) -> tuple[list[Tensor], Distance]:
    """Return the log-probabilities [R] of each sample, in a more precise dtype than `compute`, and
    what rounding to `compute` does to them.
    """
    exact = load(dtype=_MORE_PRECISE[compute]).logprobs(samples)
    rounded = load(dtype=compute).logprobs(samples)
    distance = (torch.cat(exact).double() - torch.cat(rounded).double()).abs()
    return exact, Distance(distance.mean().item(), distance.max().item())


_MORE_PRECISE = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
