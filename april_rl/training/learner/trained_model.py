"""A trained, sharded model with its optimizer."""

from __future__ import annotations

import torch

from april_rl.config.choices import Offload
from april_rl.config.schema import OptimizerConfig
from april_rl.training.learner.model.offload import Offloadable
from april_rl.training.learner.optimizer import Optimizer
from april_rl.training.learner.policy import Policy


class TrainedModel:
    """A model and its optimizer, which are saved, offloaded and loaded again together."""

    def __init__(
        self,
        model: Policy,
        config: OptimizerConfig,
        *,
        num_steps: int,
        offload: Offload,
        device: torch.device,
        lr_key: str = "optimizer.lr",
    ) -> None:
        """Make an optimizer for a run of `num_steps` optimizer steps; `lr_key` is the setting of
        its learning rate. Weights are offloaded with learner.offload=all only.
        """
        self.model = model
        self.optimizer = Optimizer(
            config,
            model.trained_units(),
            num_steps=num_steps,
            device=device,
            is_offloaded=offload is not Offload.none,
            lr_key=lr_key,
        )
        weights = model.parameters if offload is Offload.all else tuple
        self.masters = Offloadable(weights, device=device)

    def offload(self) -> None:
        """Move what `learner.offload` chooses to the host."""
        self.model.reshard_all()
        self.masters.offload()
        self.optimizer.offload()

    def reload(self) -> None:
        """Bring back what `offload` moved."""
        self.masters.reload()
        self.optimizer.reload()
