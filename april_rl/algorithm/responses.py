"""Which tokens belong to one response: what losses and masks of whole responses need to know.

Legend: [T] response tokens, one response behind the other, [S] responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Responses:
    """How T tokens divide into S whole responses; a response is never spread over two rows."""

    lengths: Tensor  # [S], tokens
    index: Tensor  # [T], which response a token belongs to

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> Responses:
        """Responses of these lengths, in this order; one may be empty."""
        counts = torch.tensor(lengths, dtype=torch.int64, device=device)
        places = torch.arange(len(lengths), device=device)
        index = torch.repeat_interleave(places, counts, output_size=sum(lengths))
        return cls(lengths=counts, index=index)

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each response [S] of values [T], differentiable.

        Added up in float64: a response may have 50,000 tokens, and a GPU adds them in any order.
        """
        zeros = values.new_zeros(len(self.lengths), dtype=torch.float64)
        return zeros.index_add(0, self.index, values.double()).to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """Mean over each response [S] of values [T], differentiable; 0 of an empty one."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """The value of its response for every token [T], of values [S]; differentiable."""
        return values[self.index]
