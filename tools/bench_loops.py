"""What one would write by hand for the learner's update, in plain torch and transformers.

The same mathematics without anything the learner watches over: a bfloat16 model whose float32
masters AdamW moves, the whole float32 softmax, the clipped surrogate with truncated importance
weights. No FSDP2, no entropy, no statistics, no comparison of engine and learner.

Legend: [T] tokens of a packed row, [N] response tokens in it, [B, L] sequences of a padded batch
and positions in the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from april_rl.batch.packing import MicroBatch
from april_rl.config import TrainConfig
from april_rl.learner import attention
from april_rl.learner.attention import Packing


class Outcome(NamedTuple):
    """Loss and gradient norm of an update."""

    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Inputs of the loss of a micro-batch; [N]."""

    labels: Tensor
    behaviour_logprobs: Tensor  # nats
    advantages: Tensor
    loss_weights: Tensor

    @classmethod
    def of(cls, positions: MicroBatch | Sequences, device: torch.device) -> Targets:
        """Return the targets of the response tokens, in the order of the positions that predict
        them.
        """
        mask = positions.response_mask
        return cls(
            **{
                field.name: torch.from_numpy(getattr(positions, field.name)[mask]).to(device)
                for field in fields(cls)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A padded batch, zeros at the end of each row; [B, L]."""

    token_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    labels: NDArray[np.int64]
    response_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    loss_weights: NDArray[np.float32]


# Log-probabilities [N] of a micro-batch, with gradient, and what they are trained towards.
Forward = Callable[[PreTrainedModel, Any], tuple[Tensor, Targets]]


class PlainLoop:
    """Forward, backward, gradient clipping and AdamW."""

    def __init__(
        self,
        config: TrainConfig,
        forward: Forward,
        *,
        micro_batches: Sequence[Any],
        attention_name: str,
        device: torch.device,
    ) -> None:
        """`micro_batches` are passed to `forward` one by one."""
        self._config, self._forward, self._micro_batches = config, forward, micro_batches
        model = AutoModelForCausalLM.from_pretrained(
            Path(config.model.path), dtype=torch.bfloat16, attn_implementation=attention_name
        )
        self._model = model.to(device).eval()
        self._weights = list(model.parameters())
        self._masters = [nn.Parameter(weight.detach().float()) for weight in self._weights]
        self._adamw = torch.optim.AdamW(
            self._masters,
            lr=config.optimizer.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )

    def update(self) -> Outcome:
        """Make one optimizer step over all micro-batches."""
        self._adamw.zero_grad()
        losses = []
        for micro_batch in self._micro_batches:
            loss = self._loss(*self._forward(self._model, micro_batch))
            loss.backward()
            self._collect_gradients()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self._masters, self._config.optimizer.max_grad_norm)
        self._adamw.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        return Outcome(torch.stack(losses).sum().item(), norm.item())

    def _loss(self, logprobs: Tensor, targets: Targets) -> Tensor:
        """Return the clipped surrogate against the policy at the start of the step, which is the
        present one.
        """
        algorithm, held = self._config.algorithm, logprobs.detach()
        ratio = torch.exp(logprobs - held)
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        gain = torch.minimum(ratio * targets.advantages, clipped * targets.advantages)
        weights = torch.exp(held - targets.behaviour_logprobs).clamp(max=algorithm.tis_cap)
        return -(targets.loss_weights * weights * gain).sum()

    def _collect_gradients(self) -> None:
        """Add the gradients of the micro-batch to those of the float32 master weights."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            assert weight.grad is not None
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None


def packed_forward(temperature: float) -> Forward:
    """Return a forward pass over a packed row with the learner's attention; logits of response
    tokens only.
    """

    def forward(model: PreTrainedModel, row: MicroBatch) -> tuple[Tensor, Targets]:
        device = model.device
        hidden = model.base_model(
            input_ids=torch.from_numpy(row.token_ids).to(device)[None],
            position_ids=torch.from_numpy(row.position_ids).to(device)[None],
            use_cache=False,
            packing=Packing.of(row.lengths, device=device),
        ).last_hidden_state[0]
        mask = torch.from_numpy(row.response_mask).to(device)
        logits = model.get_output_embeddings()(hidden[mask])
        targets = Targets.of(row, device)
        return _logprobs(logits, targets.labels, temperature), targets

    return forward


def padded_forward(temperature: float) -> Forward:
    """Return a forward pass over a padded batch as in transformers; logits of every position."""

    def forward(model: PreTrainedModel, batch: Sequences) -> tuple[Tensor, Targets]:
        device = model.device
        logits = model(
            input_ids=torch.from_numpy(batch.token_ids).to(device),
            attention_mask=torch.from_numpy(batch.attention_mask).to(device),
            use_cache=False,
        ).logits
        mask = torch.from_numpy(batch.response_mask).to(device)
        targets = Targets.of(batch, device)
        return _logprobs(logits[mask], targets.labels, temperature), targets

    return forward


def _logprobs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0]


def packed_loop(
    config: TrainConfig, rows: Sequence[MicroBatch], *, device: torch.device
) -> PlainLoop:
    """Return the loop over the same rows as the learner."""
    attention.register()
    return PlainLoop(
        config,
        packed_forward(config.rollout.temperature),
        micro_batches=rows,
        attention_name=attention.NAME,
        device=device,
    )


def padded_loop(
    config: TrainConfig, rows: Sequence[MicroBatch], *, is_sorted: bool, device: torch.device
) -> PlainLoop:
    """Return the loop over the sequences of `rows` in padded batches of at most learner.max_tokens.

    `is_sorted`: batches are sorted by length, for the least padding; otherwise in random order.
    """
    pieces = [piece for row in rows for piece in _pieces(row)]
    order = np.random.default_rng(0).permutation(len(pieces)).tolist()
    if is_sorted:
        order.sort(key=lambda i: len(pieces[i]["token_ids"]))
    batches = list(_batches([pieces[i] for i in order], config.learner.max_tokens))
    return PlainLoop(
        config,
        padded_forward(config.rollout.temperature),
        micro_batches=batches,
        attention_name="sdpa",
        device=device,
    )


Piece = dict[str, NDArray[Any]]  # the fields of `Sequences` of one sequence


def _pieces(row: MicroBatch) -> Iterator[Piece]:
    """Yield the sequences of a row."""
    names = [field.name for field in fields(Sequences) if field.name != "attention_mask"]
    ends = np.cumsum(row.lengths)
    for end, length in zip(ends, row.lengths, strict=True):
        piece = {name: getattr(row, name)[end - length : end] for name in names}
        yield piece | {"attention_mask": np.ones(length, np.int64)}


def _batches(pieces: Iterable[Piece], max_tokens: int) -> Iterator[Sequences]:
    """Yield padded batches of at most `max_tokens` positions."""
    held: list[Piece] = []
    longest = 0
    for piece in pieces:
        longest = max(longest, len(piece["token_ids"]))
        if held and longest * (len(held) + 1) > max_tokens:
            yield _padded(held)
            held, longest = [], len(piece["token_ids"])
        held.append(piece)
    yield _padded(held)


def _padded(pieces: Sequence[Piece]) -> Sequences:
    longest = max(len(piece["token_ids"]) for piece in pieces)

    def stacked(name: str) -> NDArray[Any]:
        arrays = [piece[name] for piece in pieces]
        return np.stack([np.pad(array, (0, longest - len(array))) for array in arrays])

    return Sequences(**{field.name: stacked(field.name) for field in fields(Sequences)})
