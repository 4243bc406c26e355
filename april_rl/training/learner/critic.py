"""The critic: values of response tokens, advantages from them, and its own optimizer steps; and a
policy that is trained with these advantages.

Legend: [N] response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from april_rl.config.models_beside import CriticConfig
from april_rl.config.schema import LearnerConfig, OptimizerConfig
from april_rl.metrics import Mean, Metrics, merge
from april_rl.training.algorithm.gae import gae, value_loss
from april_rl.training.learner.mesh import Site
from april_rl.training.learner.model.checkpoint import local_folder
from april_rl.training.learner.model.offload import return_cached_memory
from april_rl.training.learner.row import PackedRow
from april_rl.training.learner.trained_model import TrainedModel
from april_rl.training.learner.update_errors import NonFiniteError
from april_rl.training.learner.value_model import ValueModel

if TYPE_CHECKING:
    from april_rl.training.batch.packing import MicroBatch
    from april_rl.training.learner.learner import Learner

_EPS = 1e-8  # keeps the advantages of a batch without spread finite


class Targets(NamedTuple):
    """Inputs of the value loss of one row; both [N]."""

    old_values: Tensor  # before the update
    returns: Tensor


class Judged(NamedTuple):
    """Advantages, and targets of the value loss, for the rows of an update, by minibatch."""

    advantages: list[list[Tensor]]  # [N]
    targets: list[list[Targets]]
    metrics: Metrics


class Critic:
    """One rank's shard of a value model and its optimizer."""

    def __init__(
        self,
        config: CriticConfig,
        site: Site,
        *,
        model_path: str,
        learner: LearnerConfig,
        optimizer: OptimizerConfig,
        num_optimizer_steps: int,
        num_steps_alone: int,
    ) -> None:
        """Load this rank's shard of the model at `config.path`, or else at the policy's
        `model_path`; a collective. `num_optimizer_steps` counts the whole run, `num_steps_alone`
        only the steps before the policy is trained.
        """
        self._config, self._device = config, site.device
        self._num_steps_alone = num_steps_alone
        self._model = ValueModel.build(
            local_folder(config.path or model_path),
            site,
            activation_checkpointing=learner.recomputed_share,
            keep_attention=learner.keep_attention is True,
            temperature=1.0,
        )
        self.trained = TrainedModel(
            self._model,
            replace(optimizer, lr=config.lr),
            num_steps=num_optimizer_steps,
            offload=learner.offload,
            device=site.device,
            lr_key="critic.lr",
        )

    @property
    def trains_alone(self) -> bool:
        """Return whether the next update is part of the warm-up."""
        return self.trained.optimizer.num_steps < self._num_steps_alone

    @torch.no_grad()
    def judge(self, rows: Sequence[Sequence[PackedRow]]) -> Judged:
        """Estimate advantages from the rewards of tokens, which `rows` have as credits, with mean 0
        and standard deviation 1 over the trained tokens of all ranks. A collective; `rows` has one
        sequence per minibatch.
        """
        config = self._config
        advantages: list[list[Tensor]] = []
        targets: list[list[Targets]] = []
        for part in rows:
            values = [self._model(row) for row in part]
            pairs = list(zip(part, values, strict=True))
            advantages.append([_gae(row, v, config.policy_lambda) for row, v in pairs])
            targets.append([Targets(v, _gae(row, v, config.value_lambda) + v) for row, v in pairs])
        metrics = _quality(rows, targets, device=self._device)
        return Judged(_standardise(rows, advantages, device=self._device), targets, metrics)

    def update(
        self,
        rows: Sequence[Sequence[PackedRow]],
        targets: Sequence[Sequence[Targets]],
        *,
        num_passes: int,
    ) -> Metrics:
        """Take one optimizer step per minibatch and pass. A collective. Raise NonFiniteError when a
        gradient is not finite: that step and the later ones are skipped.
        """
        steps: list[Metrics] = []
        parts = num_passes * [*zip(rows, targets, strict=True)]
        try:
            for part, part_targets in parts:
                steps.append(self._step(part, part_targets))
        except NonFiniteError as error:
            raise NonFiniteError(
                f"optimizer step {len(steps) + 1} of {len(parts)} of the critic was not finite; "
                f"this step and the later ones were skipped; the policy is not affected: {error}"
            ) from error
        finally:
            return_cached_memory(self._device)
        return merge(steps)

    def _step(self, rows: Sequence[PackedRow], targets: Sequence[Targets]) -> Metrics:
        self.trained.optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for number, (row, target) in enumerate(zip(rows, targets, strict=True), start=1):
            self._model.set_last_backward(number == len(rows))
            losses = value_loss(
                self._model(row),
                target.returns,
                old_values=target.old_values,
                clip=self._config.value_clip,
            )
            loss = (row.loss_weights * losses).sum()
            # FSDP averages gradients over ranks; the loss is a sum over them.
            torch.autograd.backward(loss * dist.get_world_size())
            total += loss.detach()
        dist.all_reduce(total)
        try:
            report = self.trained.optimizer.step()
        finally:
            self.trained.optimizer.zero_grad()
        return Metrics({"critic/loss": total.item(), "critic/grad_norm": report.grad_norm})


class ActorCritic:
    """A policy and the critic that estimates its advantages."""

    def __init__(self, policy: Learner, critic: Critic, *, num_passes: int) -> None:
        """Train `policy`, which saves and offloads the critic's model too."""
        self.policy, self.critic, self._num_passes = policy, critic, num_passes

    def update(self, minibatches: Sequence[Sequence[MicroBatch]]) -> Metrics:
        """Update the policy as `Learner.update` does, and then the critic. While the critic warms
        up, the policy is only compared with the engine.
        """
        rows = self.policy.rows(minibatches)
        judged = self.critic.judge(rows)
        if self.critic.trains_alone:
            of_policy = self.policy.compare(rows[0])
        else:
            of_policy = self.policy.train(rows, judged.advantages)
        of_critic = self.critic.update(rows, judged.targets, num_passes=self._num_passes)
        return merge([judged.metrics, of_policy, of_critic])


def _gae(row: PackedRow, values: Tensor, decay: float) -> Tensor:
    return gae(row.credits, values, row.responses, decay=decay)


def _standardise(
    rows: Sequence[Sequence[PackedRow]],
    advantages: Sequence[Sequence[Tensor]],
    *,
    device: torch.device,
) -> list[list[Tensor]]:
    """Return the advantages shifted to mean 0 and scaled to standard deviation 1."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for row, of_row in zip(chain(*rows), chain(*advantages), strict=True):
        trained = of_row[row.loss_weights > 0].double()
        sums += torch.stack([torch.ones_like(trained).sum(), trained.sum(), trained.square().sum()])
    count, total, squares = _over_ranks(sums)
    mean = total / max(count, 1.0)
    std = max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5
    return [[(of_row - mean) / (std + _EPS) for of_row in part] for part in advantages]


def _quality(
    rows: Sequence[Sequence[PackedRow]],
    targets: Sequence[Sequence[Targets]],
    *,
    device: torch.device,
) -> Metrics:
    """Return the share of the returns' variance that the values explain, over all ranks, and the
    mean error of this rank's values on tokens of age 0 and on older ones.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    errors = torch.zeros(4, dtype=torch.float64, device=device)
    for row, target in zip(chain(*rows), chain(*targets), strict=True):
        is_trained = row.loss_weights > 0
        returns = target.returns[is_trained].double()
        error = returns - target.old_values[is_trained].double()
        moments = (returns.sum(), returns.square().sum(), error.sum(), error.square().sum())
        sums += torch.stack([torch.ones_like(returns).sum(), *moments])
        is_old = row.ages[is_trained] > 0
        for number, chosen in enumerate((error[~is_old].abs(), error[is_old].abs())):
            errors[2 * number] += chosen.sum()
            errors[2 * number + 1] += len(chosen)
    count, total, squares, error_total, error_squares = _over_ranks(sums)
    new_total, num_new, old_total, num_old = errors.tolist()
    found: dict[str, float | Mean] = {}
    if num_new:
        found["critic/error_new"] = Mean(new_total, num_new)
    if num_old:
        found["critic/error_old"] = Mean(old_total, num_old)
    variance = squares * count - total**2
    if variance > _EPS * squares * count:  # otherwise the returns differ only by rounding
        unexplained = error_squares * count - error_total**2
        found["critic/explained_variance"] = 1 - unexplained / variance
    return Metrics(found)


def _over_ranks(sums: Tensor) -> list[float]:
    dist.all_reduce(sums)
    return list(map(float, sums))
