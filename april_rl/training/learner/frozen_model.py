"""Frozen models beside the policy: the reference, which is the checkpoint a run started from or
the policy that last replaced it (`algorithm.reference_every`), and a teacher. Each is a sharded
model; with LoRA the reference is the policy without its adapters.

Legend: [N] response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from april_rl.training.learner.mesh import Site
from april_rl.training.learner.model.lora import without_adapters
from april_rl.training.learner.model.offload import Offloadable
from april_rl.training.learner.model.shards import local_shard
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow


class FrozenModel:
    """A model that is not trained; between calls its weights are in host memory."""

    def __init__(self, folder: Path, site: Site, *, temperature: float) -> None:
        """Load this rank's shard; a collective.

        Weights are stored in the compute dtype: they give the same numbers as the policy before its
        first step, in half the memory of its master weights.
        """
        self._policy = Policy.build(
            folder,
            site,
            storage_dtype=site.compute_dtype,
            activation_checkpointing=False,
            temperature=temperature,
        ).requires_grad_(False)
        moved = tuple if site.device.type == "cpu" else self._policy.parameters
        self.weights = Offloadable(moved, device=site.device, is_constant=True)
        self.weights.offload()

    def shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and this rank's shard of every parameter, which `weights` moves."""
        return self._policy.named_parameters()

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[PackedRow]]) -> list[list[Tensor]]:
        """Return log-probabilities [N] of every row; nats, at the sampling temperature.

        `rows` has one sequence per minibatch. A collective; all ranks have the same number of rows.
        """
        self.weights.reload()
        found = [[self._policy(row)[0] for row in part] for part in rows]
        self._policy.reshard_all()
        self.weights.offload()
        return found


class MovingReference(FrozenModel):
    """A reference that the policy replaces after every `every` updates."""

    def __init__(self, folder: Path, site: Site, *, temperature: float, every: int) -> None:
        super().__init__(folder, site, temperature=temperature)
        self._every, self.age = every, 0  # updates of the policy since it became this model

    @torch.no_grad()
    def follow(self, policy: Policy) -> None:
        """Count an update of `policy`, which has the same model and mesh; copy its weights when
        that is due.
        """
        self.age += 1
        if self.age < self._every:
            return
        self.age = 0
        policy.reshard_all()
        with self.weights.change():
            for own, its in zip(self._policy.parameters(), policy.parameters(), strict=True):
                local_shard(own)[0].copy_(local_shard(its)[0])


class OwnReference:
    """The policy without its adapters: the model a LoRA run started from, at no extra memory."""

    def __init__(self, policy: Policy) -> None:
        """Use the trained `policy`; its adapters are switched off only during a call."""
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[PackedRow]]) -> list[list[Tensor]]:
        """Return what `FrozenModel.logprobs` does."""
        with without_adapters(self._policy):
            return [[self._policy(row)[0] for row in part] for part in rows]
