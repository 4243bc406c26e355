"""The frozen reference: the checkpoint a run started from, as a second sharded model or as what
adapters were added to.

Legend: [N] response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from april_rl.learner.lora import without_adapters
from april_rl.learner.policy import Policy, build_policy
from april_rl.learner.row import PackedRow


class Reference:
    """A policy that is never trained; between two calls its weights are in host memory."""

    def __init__(
        self,
        folder: Path,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        compute_dtype: torch.dtype,
        temperature: float,
    ) -> None:
        """Load this rank's shard; a collective.

        Weights are stored in the precision they are computed with: the numbers are those of the
        policy before its first step, in half the memory of its masters.
        """
        self._device = device
        self._policy = build_policy(
            folder,
            mesh=mesh,
            device=device,
            compute_dtype=compute_dtype,
            storage_dtype=compute_dtype,
            activation_checkpointing=False,
            temperature=temperature,
        ).requires_grad_(False)
        self._policy.to("cpu")

    def on_forward(self, call: Callable[[], None]) -> None:
        """Have `call` called after each forward pass."""
        self._policy.register_forward_hook(lambda *_: call())

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[PackedRow]]) -> list[list[Tensor]]:
        """Reference log-probabilities [N] of every row; nats, at the sampling temperature.

        A collective; all ranks have as many rows.
        """
        self._policy.to(self._device)
        found = [[self._policy(row)[0] for row in part] for part in rows]
        self._policy.to("cpu")
        return found


class OwnReference:
    """The policy itself without its adapters: what a run with adapters started from, for free."""

    def __init__(self, policy: Policy) -> None:
        """`policy` is the one that is trained; its adapters are on again between two calls."""
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[PackedRow]]) -> list[list[Tensor]]:
        """Reference log-probabilities [N] of every row; nats, at the sampling temperature.

        A collective; all ranks have as many rows.
        """
        with without_adapters(self._policy):
            return [[self._policy(row)[0] for row in part] for part in rows]
