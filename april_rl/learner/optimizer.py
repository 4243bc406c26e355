"""AdamW over shards, its learning-rate schedule, and the check for finite gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from april_rl.config.choices import Schedule
from april_rl.config.schema import OptimizerConfig
from april_rl.learner.update_errors import NonFiniteError


class StepReport(NamedTuple):
    """Gradient norm and learning rate of one optimizer step."""

    grad_norm: float  # before clipping
    lr: float


def lr_factor(step: int, *, warmup_steps: int, num_steps: int, schedule: Schedule) -> float:
    """Return the factor on the learning rate at optimizer step `step` (from 0).

    It rises linearly from 1 / warmup_steps to 1. Then it stays 1 (constant), or falls towards 0,
    which it would reach at `num_steps`: linearly, or as half a cosine.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    match schedule:
        case Schedule.constant:
            return 1.0
        case Schedule.linear:
            return 1.0 - progress
        case Schedule.cosine:
            return 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW with a learning-rate schedule and gradient clipping; refuses non-finite gradients."""

    def __init__(
        self, config: OptimizerConfig, parameters: Iterable[nn.Parameter], *, num_steps: int
    ) -> None:
        """Build AdamW over the `parameters` of the sharded model.

        `num_steps` counts the optimizer steps of the whole run, for the schedule. Weight decay
        applies to matrices only, not to norms and biases, as is usual.
        """
        self._parameters = list(parameters)
        matrices = [p for p in self._parameters if p.dim() >= 2]
        vectors = [p for p in self._parameters if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._max_grad_norm = config.max_grad_norm
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._factor = partial(
            lr_factor,
            warmup_steps=config.warmup_steps,
            num_steps=num_steps,
            schedule=config.schedule,
        )
        self._schedule = LambdaLR(self._adamw, self._factor)

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def moments(self) -> Iterator[Tensor]:
        """Yield the optimizer state of every parameter: AdamW's two moments and a step count.

        Yields nothing before the first step, and the same tensors from then on.
        """
        for of_parameter in self._adamw.state.values():
            yield from of_parameter.values()

    @property
    def num_steps(self) -> int:
        return self._schedule.last_epoch

    def moments_of(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor] | None:
        """Return AdamW's two moments of a parameter, or None before the first step."""
        state = self._adamw.state.get(parameter)
        return (state["exp_avg"], state["exp_avg_sq"]) if state else None

    def continue_after(self, num_steps: int) -> None:
        """Continue after `num_steps` steps; the caller fills the moments, which start at zero."""
        for parameter in self._parameters if num_steps else ():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(num_steps), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        for group in self._adamw.param_groups:
            group["lr"] = group["initial_lr"]
        # The constructor takes one step itself, which brings last_epoch to `num_steps`.
        self._schedule = LambdaLR(self._adamw, self._factor, last_epoch=num_steps - 1)

    def step(self) -> StepReport:
        """Clip the gradients and update the weights.

        Raises NonFiniteError, with weights and optimizer state unchanged, when the gradient norm
        over all ranks is not finite.
        """
        grad_norm = _value(nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        if not math.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}. Lower optimizer.lr, or set "
                "learner.compute_dtype=float32 to see whether precision is the cause"
            )
        lr = self._schedule.get_last_lr()[0]
        self._adamw.step()
        self._schedule.step()
        return StepReport(grad_norm=grad_norm, lr=float(lr))


def _value(norm: Tensor) -> float:
    """Return a norm as a number; it may be sharded over ranks."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
