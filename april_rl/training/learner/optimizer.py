"""AdamW over shards, its learning-rate schedule, and the check for finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from april_rl.config.choices import Schedule
from april_rl.config.schema import OptimizerConfig
from april_rl.training.learner.model.offload import Offloadable
from april_rl.training.learner.update_errors import NonFiniteError

EPS = 1e-8  # added to the root of the mean square

Fill = Callable[[nn.Parameter, "Moments"], None]


class Moments(NamedTuple):
    """AdamW's two moments of a parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


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
    """AdamW with a learning-rate schedule and gradient clipping; refuses non-finite gradients.

    During a step, offloaded optimizer state is moved to the device unit by unit, so that only one
    unit is there at a time.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        units: Sequence[Sequence[nn.Parameter]],
        *,
        num_steps: int,
        device: torch.device,
        is_offloaded: bool = False,
        lr_key: str = "optimizer.lr",
    ) -> None:
        """Build AdamW over the parameters of the sharded model, given by FSDP unit.

        `num_steps` counts the optimizer steps of the whole run, for the schedule. Weight decay
        applies to matrices only, not to norms and biases, as is usual. `lr_key` is the setting of
        the learning rate, for messages.
        """
        self._config, self._num_run_steps = config, num_steps
        self.num_steps = 0  # taken so far
        self._lr_key = lr_key
        self._parameters = list(chain.from_iterable(units))
        pieces = units if is_offloaded else [self._parameters]
        self._pieces = [
            _Piece(piece, config, device=device, is_offloaded=is_offloaded) for piece in pieces
        ]
        self._piece_of = {p: piece for piece in self._pieces for p in piece.parameters}

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters, which frees their memory."""
        for parameter in self._parameters:
            parameter.grad = None

    def offload(self) -> None:
        """Move the optimizer state to the host, if this optimizer offloads it."""
        for piece in self._pieces:
            piece.state.offload()

    def reload(self) -> None:
        """Bring the whole optimizer state to the device."""
        for piece in self._pieces:
            piece.state.reload()

    def host_copy(self, parameter: nn.Parameter) -> Moments | None:
        """Return a host copy of a parameter's local moments, or None before the first step."""
        return self._piece_of[parameter].host_copy(parameter)

    def continue_after(self, num_steps: int, fill: Fill) -> None:
        """Continue after `num_steps` steps; `fill` writes the moments of each parameter."""
        self.num_steps = num_steps
        for piece in self._pieces if num_steps else ():
            piece.continue_after(num_steps, fill)

    def step(self) -> StepReport:
        """Clip the gradients and update the weights.

        Raises NonFiniteError, with weights and optimizer state unchanged, when the gradient norm
        over all ranks is not finite.
        """
        norm = _value(nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm is {norm}. Lower {self._lr_key}, or set "
                "learner.compute_dtype=float32 to see whether precision is the cause"
            )
        lr = self._config.lr * lr_factor(
            self.num_steps,
            warmup_steps=self._config.warmup_steps,
            num_steps=self._num_run_steps,
            schedule=self._config.schedule,
        )
        for piece in self._pieces:
            piece.step(lr)
        self.num_steps += 1
        return StepReport(grad_norm=norm, lr=lr)


class _Piece:
    """AdamW over parameters whose optimizer state moves between host and device together."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: OptimizerConfig,
        *,
        device: torch.device,
        is_offloaded: bool,
    ) -> None:
        self.parameters = parameters
        groups = [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=EPS,
            fused=True,
        )
        self.state = Offloadable(self.tensors if is_offloaded else tuple, device=device)

    def tensors(self) -> Iterator[Tensor]:
        """Yield AdamW's two moments and a step count of every parameter: nothing before the first
        step, and the same tensors from then on.
        """
        for of_parameter in self._adamw.state.values():
            yield from of_parameter.values()

    def host_copy(self, parameter: nn.Parameter) -> Moments | None:
        state = self._adamw.state.get(parameter)
        if not state:
            return None
        return Moments(*(self.state.host_copy(state[name]) for name in Moments._fields))

    def continue_after(self, num_steps: int, fill: Fill) -> None:
        self.state.reload()
        for parameter in self.parameters:
            moments = Moments(torch.zeros_like(parameter), torch.zeros_like(parameter))
            count = torch.tensor(float(num_steps), device=parameter.device)
            self._adamw.state[parameter] = {"step": count, **moments._asdict()}
            fill(parameter, moments)
        self.state.offload()

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self.state.reload()
        self._adamw.step()
        self.state.offload()


def _value(norm: Tensor) -> float:
    """Return a norm as a number; it may be sharded over ranks."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
