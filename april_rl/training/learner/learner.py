"""The learner of one FSDP2 rank: it trains on packed micro-batches and gathers whole weights.

Legend: [T] tokens of a packed row, [N] response tokens in it. Minibatch: the rows of one optimizer
step; micro-batch: the row of one forward and backward pass. Initialise `torch.distributed` before
building a Learner, also for a single rank (a group with a `HashStore` needs no port).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from april_rl.config.lora import LoraConfig
from april_rl.config.schema import LearnerConfig, OptimizerConfig
from april_rl.metrics import Metrics, merge
from april_rl.training.batch.packing import MicroBatch
from april_rl.training.learner.frozen_model import FrozenModel, MovingReference, OwnReference
from april_rl.training.learner.mesh import Site
from april_rl.training.learner.mismatch import Mismatch
from april_rl.training.learner.model.checkpoint import Checkpoint, local_folder
from april_rl.training.learner.model.export import export
from april_rl.training.learner.model.lora import adapter_writer, write_adapter
from april_rl.training.learner.model.offload import return_cached_memory
from april_rl.training.learner.model.routers import Routers
from april_rl.training.learner.objective import Objective
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import Anchor, PackedRow
from april_rl.training.learner.statistics import TokenStatistics
from april_rl.training.learner.trained_model import TrainedModel
from april_rl.training.learner.training_state import Snapshot, TrainingState
from april_rl.training.learner.update_errors import NonFiniteError


class Learner:
    """One rank's shard of policy and optimizer; methods reload what `offload` moved to the host."""

    def __init__(
        self,
        config: LearnerConfig,
        site: Site,
        *,
        optimizer: OptimizerConfig,
        lora: LoraConfig,
        objective: Objective,
        model_path: str,
        teacher_path: str | None = None,
        beside: Mapping[str, TrainedModel] = MappingProxyType({}),
        temperature: float,
        seed: int,
        num_optimizer_steps: int,
        num_passes: int = 1,
    ) -> None:
        """Load this rank's shard; a collective. Raise ModelFolderError if a model cannot be loaded.

        `beside` has models that are trained elsewhere, but saved, restored and offloaded with the
        policy, by the prefix of their tensors. `temperature` is the sampling temperature; `seed`
        initialises adapters. A run has `num_optimizer_steps` of the policy. With `lora.rank` set
        only adapters are trained; the model is frozen in the compute dtype.
        """
        self._device, self._compute_dtype = site.device, site.compute_dtype
        self._folder = local_folder(model_path)
        self._lora = None if lora.rank is None else lora
        self._policy = self._build_policy(config, site, temperature=temperature, seed=seed)
        trained = TrainedModel(
            self._policy,
            optimizer,
            num_steps=num_optimizer_steps,
            offload=config.offload,
            device=self._device,
        )
        self._optimizer, self._masters = trained.optimizer, trained.masters
        self._models = {"": trained, **beside}
        self._num_updates, self._model_path, self._num_passes = 0, model_path, num_passes
        self._objective, self._max_mismatch = objective, config.max_mismatch
        frozen = partial(FrozenModel, site=site, temperature=temperature)
        self._moving: MovingReference | None = None
        if every := objective.reference_every:
            self._moving = MovingReference(self._folder, site, temperature=temperature, every=every)
        self._reference = self._moving or self._build_reference(frozen)
        self._teacher = frozen(local_folder(teacher_path)) if teacher_path else None
        self._routers = Routers(self._policy if config.router_replay.is_on else None)
        self._state = TrainingState(
            self._models,
            mesh=site.mesh,
            entropy_bonus=objective.entropy_bonus,
            reference=self._moving,
        )

    def update(self, minibatches: Sequence[Sequence[MicroBatch]]) -> Metrics:
        """Take one optimizer step per minibatch and pass; return this rank's metrics, to merge over
        ranks. A collective; all ranks have the same number of micro-batches in each minibatch. The
        loss is a sum over the tokens of all ranks. Raises MismatchError before the first step when
        engine and learner differ by several times `max_mismatch` on tokens of the current weights,
        NonFiniteError when a loss or gradient is not finite, and OwnFunctionError when the user's
        loss fails: then that minibatch and the later ones change nothing, and the earlier optimizer
        steps stay. Gradients are freed before the call returns.
        """
        rows = self.rows(minibatches)
        return self.train(rows, [[row.credits for row in part] for part in rows])

    def rows(self, minibatches: Sequence[Sequence[MicroBatch]]) -> list[list[PackedRow]]:
        """Begin an update: reload the models, and return the rows on this rank's device."""
        self._num_updates += 1
        for model in self._models.values():
            model.masters.reload()
        return [[PackedRow.of(m, device=self._device) for m in part] for part in minibatches]

    @torch.no_grad()
    def compare(self, rows: Sequence[PackedRow]) -> Metrics:
        """Compare engine and learner on rows that are not trained; raise MismatchError."""
        mismatch = Mismatch(device=self._device)
        for row in rows:
            with self._routers.repeating(self._routers.of_engine(row.experts)):
                mismatch.add(row, self._policy(row)[0])
        self._check(mismatch)
        return mismatch.metrics()

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities [N] of a row's response tokens, in nats."""
        logprobs: Tensor = self._policy(PackedRow.of(batch, device=self._device))[0]
        return logprobs

    def train(
        self, rows: Sequence[Sequence[PackedRow]], advantages: Sequence[Sequence[Tensor]]
    ) -> Metrics:
        """Take the optimizer steps of an update; `advantages` are [N] of each row."""
        mismatch = Mismatch(device=self._device)
        statistics = TokenStatistics(device=self._device)
        anchors = self._anchors(rows, advantages, mismatch)
        steps: list[Metrics] = []
        try:
            for part, part_anchors in self._num_passes * [*zip(rows, anchors, strict=True)]:
                self._optimizer.zero_grad()
                compared = None if steps else mismatch
                loss = self._accumulate(part, part_anchors, statistics, compared=compared)
                if not steps:
                    self._check(mismatch)
                steps.append(self._step(loss))
        except NonFiniteError as error:
            raise error.after(len(steps), num_minibatches=len(rows)) from error
        finally:
            self._optimizer.zero_grad()
            return_cached_memory(self._device)
        if self._moving is not None:
            self._moving.follow(self._policy)
        adapted = self._adapt_entropy_bonus(statistics)
        return merge([*steps, statistics.metrics(), mismatch.metrics(), adapted])

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor, in `compute_dtype`, of everything in a checkpoint.

        An engine of the same dtype then computes with the learner's exact numbers. A collective:
        every rank iterates to the end, even one that needs nothing. A tied lm_head is left out
        because it is the embedding. With `merged` false, adapters are left out.
        """
        self._masters.reload()
        return self._policy.gather(self._compute_dtype, merged=merged)

    def write_adapter(self, folder: Path) -> int:
        """Write float32 adapters in the form of peft into this rank's `folder`; return their bytes.
        A collective.
        """
        assert self._lora is not None
        self._masters.reload()
        self._policy.reshard_all()
        return write_adapter(self._policy, self._lora, folder)

    def export(self, path: Path | str) -> None:
        """Write weights, config and tokenizer as the Hugging Face folder `path`.

        Adapters are merged, and also written alone into the subfolder `adapter`; other tensors of
        model.path, such as an image encoder, are copied. A collective; rank 0 writes. The
        folder appears whole or not at all, and replaces one that is there.
        """
        self._policy.reshard_all()
        checkpoint, untouched = Checkpoint(self._folder), self._policy.untouched
        export(
            chain(self.weights(), checkpoint.tensors(untouched)),
            dtype=self._compute_dtype,
            sizes=[
                *self._policy.stored_bytes(self._compute_dtype),
                *(tensor.nbytes for _, tensor in checkpoint.tensors(untouched)),
            ],
            source=self._folder,
            target=Path(path),
            also=adapter_writer(self._policy, self._lora, base=self._model_path),
        )

    def snapshot(self) -> Snapshot:
        return self._state.snapshot()

    def load_state(self, folder: Path) -> None:
        """Continue from the snapshots that any number of ranks wrote; raise TrainingStateError."""
        self._state.load(folder)
        self._num_updates += 1  # the engine will get its weights by a sync, not from model.path

    def offload(self) -> None:
        """Move the state chosen by `learner.offload` to the host and free unused device memory."""
        for model in self._models.values():
            model.offload()
        return_cached_memory(self._device)

    def reload(self) -> None:
        """Bring back what `offload` moved; optional, because the other methods do it too."""
        for model in self._models.values():
            model.reload()

    def _build_policy(
        self, config: LearnerConfig, site: Site, *, temperature: float, seed: int
    ) -> Policy:
        return Policy.build(
            self._folder,
            site,
            activation_checkpointing=config.recomputed_share,
            keep_attention=config.keep_attention is True,
            temperature=temperature,
            storage_dtype=torch.float32 if self._lora is None else site.compute_dtype,
            lora=self._lora,
            lora_seed=seed,
        )

    def _build_reference(
        self, frozen: Callable[[Path], FrozenModel]
    ) -> FrozenModel | OwnReference | None:
        """Return a second model or, with LoRA, the policy without adapters; None if unused."""
        if not self._objective.needs_reference:
            return None
        if self._lora is not None:
            return OwnReference(self._policy)
        return frozen(self._folder)

    def _anchors(
        self,
        rows: Sequence[Sequence[PackedRow]],
        advantages: Sequence[Sequence[Tensor]],
        mismatch: Mismatch,
    ) -> list[list[Anchor]]:
        """Return the anchor of every row of each minibatch; add log-probabilities to `mismatch`.

        The first minibatch gets its proximal log-probabilities from its own forward pass in the
        update, unless there is a second pass over the rows.
        """
        anchors = [[Anchor(each) for each in part] for part in advantages]
        first = 0 if self._num_passes > 1 else 1
        for number in range(first, len(rows)) if self._objective.needs_proximal else ():
            anchors[number] = [
                self._with_proximal(anchor, row, mismatch)
                for anchor, row in zip(anchors[number], rows[number], strict=True)
            ]
        by_model = [_logprobs(model, rows) for model in (self._reference, self._teacher)]
        return [
            [
                anchor._replace(
                    reference=reference,
                    teacher=row.teacher_logprobs if teacher is None else teacher,
                )
                for row, anchor, reference, teacher in zip(*part, strict=True)
            ]
            for part in zip(rows, anchors, *by_model, strict=True)
        ]

    @torch.no_grad()
    def _with_proximal(self, anchor: Anchor, row: PackedRow, mismatch: Mismatch) -> Anchor:
        with self._routers.repeating(self._routers.of_engine(row.experts)):
            logprobs = self._policy(row)[0]
        mismatch.add(row, logprobs)
        return anchor._replace(proximal=logprobs, choices=self._routers.last_choices())

    def _accumulate(
        self,
        rows: Sequence[PackedRow],
        anchors: Sequence[Anchor],
        statistics: TokenStatistics,
        *,
        compared: Mismatch | None,
    ) -> Tensor:
        """Run the forward and backward pass of every row; gradients accumulate. Return this rank's
        share of the loss over all ranks. Rows whose proximal pass was not compared with the engine
        are added to `compared`.
        """
        losses = []
        for number, (row, anchor) in enumerate(zip(rows, anchors, strict=True), start=1):
            self._policy.set_last_backward(number == len(rows))
            choices = anchor.choices or self._routers.of_engine(row.experts)
            with self._routers.repeating(choices):
                logprobs, entropy = self._policy(row)
                loss = self._objective.of(row, logprobs, anchor)
                # FSDP averages gradients over ranks; the loss is a sum over them.
                torch.autograd.backward(loss.total * dist.get_world_size())
            losses.append(loss.total.detach())
            if compared is not None and anchor.proximal is None:
                compared.add(row, logprobs.detach())
            statistics.add(row, anchor, loss, logprobs=logprobs.detach(), entropy=entropy)
        return torch.stack(losses).sum()

    def _adapt_entropy_bonus(self, statistics: TokenStatistics) -> Metrics:
        """Set the weight of the entropy bonus in the next update; return its weight in this one."""
        bonus = self._objective.entropy_bonus
        if not bonus.is_adapted:
            return Metrics()
        weight, entropy = bonus.weight, statistics.mean_entropy()
        if entropy is not None:
            bonus.adapt(entropy)
        return Metrics({"loss/entropy_coefficient": weight})

    def _check(self, mismatch: Mismatch) -> None:
        model_type, has_synced = self._policy.model_type, self._num_updates > 1
        mismatch.check(self._max_mismatch, model_type=model_type, has_synced=has_synced)

    def _step(self, loss: Tensor) -> Metrics:
        self._objective.check()
        total = loss.clone()
        dist.all_reduce(total)
        if not math.isfinite(total.item()):
            raise NonFiniteError(
                f"the loss is {total.item()}. Check the step's rewards and advantages, and the "
                "metrics mismatch/* and loss/* of earlier steps"
            )
        report = self._optimizer.step()
        return Metrics(
            {"loss/total": total.item(), "loss/grad_norm": report.grad_norm, "loss/lr": report.lr}
        )


def _logprobs(
    model: FrozenModel | OwnReference | None, rows: Sequence[Sequence[PackedRow]]
) -> Sequence[Sequence[Tensor | None]]:
    """Return the log-probabilities of every row by a frozen model; None if there is none."""
    return [[None] * len(part) for part in rows] if model is None else model.logprobs(rows)
