"""Log-probabilities of given tokens without the full logits, computed over blocks of vocabulary.

Legend: [N] tokens, [H] hidden size, [V] vocabulary. Logits exist for one block at a time, so memory
is bounded by the block size instead of N·V. A vocabulary that fits in one block is not split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from april_rl.training.learner.model.fused import compile_function
from april_rl.training.learner.model.sizes import (
    BLOCK_BYTES,
    BLOCK_MULTIPLE,
    CPU_BLOCK_BYTES,
    MIN_BLOCK_ROWS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitShape:
    """Logits of a model from x = hidden · weight: cap · tanh(scale · x / cap), or scale · x."""

    scale: float = 1.0
    cap: float | None = None  # None: logits are not bounded

    def at(self, temperature: float) -> LogitShape:
        """Return the shape of logits / temperature."""
        cap = None if self.cap is None else self.cap / temperature
        return LogitShape(scale=self.scale / temperature, cap=cap)

    def of(self, products: Tensor) -> Tensor:
        """Return the logits of the products x; overwrites `products`."""
        if self.cap is None:
            return products if self.scale == 1 else products.mul_(self.scale)
        return products.mul_(self.scale / self.cap).tanh_().mul(self.cap)

    def bend(self, logits: Tensor) -> Tensor | None:
        """Return f = 1 - (logits / cap)², where d logits / d x = scale · f; None means 1."""
        return None if self.cap is None else 1 - (logits / self.cap).square_()


class LogprobHead(nn.Module):
    """Output layer of a language model that maps hidden states straight to log-probabilities."""

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        temperature: float,
        bias: nn.Parameter | None = None,
        shape: LogitShape | None = None,
        block_bytes: int | None = None,
    ) -> None:
        """Use `weight` [V, H], the model's own parameter, which its embedding may share.

        `bias` [V] is added to the products. `shape` is what the model does to its logits before the
        temperature; None: no change.
        `block_bytes` bounds the float32 logits in memory; None chooses a bound for the device.
        """
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._shape = (shape or LogitShape()).at(temperature)
        self._block_bytes = block_bytes
        self._is_fused = False

    def fuse(self) -> None:
        """Compute on the products of a block in one pass instead of one for each operation."""
        self._is_fused = True

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N] of the labels, with gradient, and entropy [N], without.

        `hidden` [N, H], `labels` [N]. Results are float32, in nats, at the temperature.
        """
        block = self._block_rows(hidden)
        weight: Tensor = self.weight
        if self.bias is not None:  # the weight of one more hidden unit, which is always 1
            weight = torch.cat([weight, self.bias[:, None]], dim=1)
            hidden = F.pad(hidden, (0, 1), value=1.0)
        if len(weight) <= block:
            return _in_one_block(hidden, weight, labels, self._shape)
        logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, labels, self._shape, block, self._is_fused
        )
        return logprobs, entropy

    def _block_rows(self, hidden: Tensor) -> int:
        """Return the number of vocabulary rows to compute together."""
        row_bytes = 4 * max(1, len(hidden))
        if self._block_bytes is not None:
            return max(1, self._block_bytes // row_bytes)
        suited = CPU_BLOCK_BYTES if hidden.device.type == "cpu" else BLOCK_BYTES
        return max(MIN_BLOCK_ROWS, suited // row_bytes // BLOCK_MULTIPLE * BLOCK_MULTIPLE)


def _in_one_block(
    hidden: Tensor, weight: Tensor, labels: Tensor, shape: LogitShape
) -> tuple[Tensor, Tensor]:
    """Compute a plain softmax; its logits fit in memory and are kept for the backward pass."""
    logprobs = _logits(hidden, weight, shape).log_softmax(dim=1)  # [N, V]
    with torch.no_grad():
        entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs)
    return -F.nll_loss(logprobs, labels, reduction="none"), entropy


class _TokenLogprobs(Function):
    """Online softmax over blocks of vocabulary (Milakov and Gimelshein 2018, algorithm 3).

    For the logits z at the temperature, forward keeps the running maximum, Σ exp(z - max) and Σ
    exp(z - max)·(z - max); backward computes each block's logits again.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shape: LogitShape,
        block: int,
        is_fused: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N] and entropy [N]; `block` rows are computed together."""
        lowest = torch.finfo(torch.float32).min
        top = hidden.new_full((len(labels),), lowest, dtype=torch.float32)
        sums = _Sums(top, *(torch.zeros_like(top) for _ in range(3)))
        add = compile_function(_add_block) if is_fused else _add_block
        for start, rows in _blocks(weight, block):
            sums = add(sums, hidden, rows, labels - start, shape)
        log_normaliser = sums.top + sums.total.log()
        entropy = sums.total.log() - sums.weighted / sums.total
        ctx.save_for_backward(hidden, weight, labels, log_normaliser)
        ctx.shape, ctx.block, ctx.is_fused = shape, block, is_fused  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(entropy)
        return sums.target - log_normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor, _grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """Return the gradients of hidden states and weight.

        d logprob / d x = (one-hot(label) - softmax(z)) · d z / d x. A frozen weight costs nothing.
        """
        hidden, weight, labels, log_normaliser = ctx.saved_tensors  # type: ignore[attr-defined]
        shape, block = ctx.shape, ctx.block  # type: ignore[attr-defined]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        is_trained = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        grad_weight = torch.empty_like(weight) if is_trained else None
        scaled = grad * shape.scale  # [N]
        slope_of = compile_function(_slope) if ctx.is_fused else _slope  # type: ignore[attr-defined]
        for start, rows in _blocks(weight, block):
            slope = slope_of(hidden, rows, labels - start, log_normaliser, scaled, shape)
            grad_hidden += slope @ rows
            if grad_weight is not None:
                torch.mm(slope.T, hidden, out=grad_weight[start : start + len(rows)])
            del slope  # before the next block's products are computed
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


class _Sums(NamedTuple):
    """Sums over the blocks so far, for each token; float32 [N]."""

    top: Tensor  # the largest logit z
    total: Tensor  # Σ exp(z - top)
    weighted: Tensor  # Σ exp(z - top)·(z - top)
    target: Tensor  # the logit of the label, 0 before its block


def _add_block(
    sums: _Sums, hidden: Tensor, rows: Tensor, labels: Tensor, shape: LogitShape
) -> _Sums:
    """Add a block of rows of the weight; `labels` count from its first row."""
    logits = _logits(hidden, rows, shape)
    here, column = _columns(labels, logits.shape[1])
    target = torch.where(here, logits.gather(1, column[:, None])[:, 0], sums.target)
    top = torch.maximum(sums.top, logits.amax(dim=1))
    shift = sums.top - top
    below = logits.sub_(top[:, None])
    exps = below.exp()
    weighted = (sums.weighted + shift * sums.total) * shift.exp()
    total = sums.total * shift.exp() + exps.sum(dim=1)
    weighted = weighted + exps.mul_(below).sum(dim=1)
    return _Sums(top, total, weighted, target)


def _slope(
    hidden: Tensor,
    rows: Tensor,
    labels: Tensor,
    log_normaliser: Tensor,
    scaled: Tensor,
    shape: LogitShape,
) -> Tensor:
    """Return the gradient of a block's products of hidden states and rows, in their dtype [N,
    rows].
    """
    logits = _logits(hidden, rows, shape)
    bend = shape.bend(logits)
    slope = logits.sub_(log_normaliser[:, None]).exp_().mul_(-scaled[:, None])
    here, column = _columns(labels, logits.shape[1])
    if torch.compiler.is_compiling():  # can be fused with the rest; a scatter cannot
        is_label = torch.arange(len(rows), device=rows.device) == column[:, None]
        slope = slope + is_label * (scaled * here)[:, None]
    else:
        slope.scatter_add_(1, column[:, None], (scaled * here)[:, None])
    return (slope if bend is None else slope.mul_(bend)).to(hidden.dtype)


def _blocks(weight: Tensor, block: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row number and the rows of each block."""
    return ((start, weight[start : start + block]) for start in range(0, len(weight), block))


def _logits(hidden: Tensor, rows: Tensor, shape: LogitShape) -> Tensor:
    """Return the logits of one block, float32 [N, rows]."""
    return shape.of((hidden @ rows.T).float())


def _columns(labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return whether each label is in a block of `size` rows [N], and its column there or 0 [N]."""
    here = (labels >= 0) & (labels < size)
    return here, torch.where(here, labels, 0)
