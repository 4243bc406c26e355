"""vLLM's rejection sampling on CPU, at the temperature that was asked for.

Legend: [B] requests of an engine step, [N] tokens guessed for all of them.
"""

from __future__ import annotations

import torch
import vllm.v1.sample.rejection_sampler as vllm_rejection
from torch import Tensor


def _expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """What each guessed token has of the value of its request, [N], from `x` [B].

    `cu_num_tokens` [B]: tokens guessed for a request and all before it; `num_tokens` is its last
    value. `replace_from` becomes `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def mend_rejection_sampling() -> None:
    """Make every vLLM engine of this process expand temperatures with the function above.

    vLLM's CPU kernel takes integers: it reads a temperature of 0.7 as 0, and writes its result into
    a copy that nobody reads, so that the logits of guessed tokens are divided by what is undefined.
    """
    vllm_rejection.expand_batch_to_tokens = _expand_batch_to_tokens
