"""Which tokens belong to which response, for losses and masks of whole responses.

Legend: [T] response tokens of all responses, concatenated; [S] responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Responses:
    """Division of T tokens into S whole responses; a response is always in one row."""

    lengths: Tensor  # [S], tokens
    index: Tensor  # [T], the response that a token belongs to

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> Responses:
        """Return responses of these lengths, in this order; a length may be 0."""
        counts = torch.tensor(lengths, dtype=torch.int64, device=device)
        places = torch.arange(len(lengths), device=device)
        index = torch.repeat_interleave(places, counts, output_size=sum(lengths))
        return cls(lengths=counts, index=index)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over each response [S] of values [T], differentiable.

        The sum is made in float64: a response may have 50,000 tokens, and a GPU adds them in any
        order.
        """
        zeros = values.new_zeros(len(self.lengths), dtype=torch.float64)
        return zeros.index_add(0, self.index, values.double()).to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean over each response [S] of values [T], differentiable; 0 for an empty
        one.
        """
        return self.sums(values) / self.lengths.clamp(min=1)

    def to_go(self, values: Tensor) -> Tensor:
        """Return the sum over each token and the rest of its response [T], of values [T]."""
        if not len(values):
            return values
        running = values.double().cumsum(0)
        total = running[(self.lengths.cumsum(0) - 1).clamp(min=0)]  # up to the end of a response
        return (total[self.index] - running + values).to(values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """Return for every token [T] the value of its response, from values [S]; differentiable."""
        return values[self.index]
