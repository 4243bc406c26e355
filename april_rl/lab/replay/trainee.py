"""A learner in this process, which trains recorded steps from a checkpoint on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from april_rl.config import TrainConfig
from april_rl.config.choices import Offload
from april_rl.errors import RunError
from april_rl.lab.replay.responses import TrainedResponse, Watched
from april_rl.metrics import merge
from april_rl.start.assembly.packer import build_batches, build_packer
from april_rl.start.assembly.workers import build_workers, machine_of
from april_rl.start.planning.plan import draft_training, facts_of, models_of, plan_training
from april_rl.training.batch.packing import Packer
from april_rl.training.batches import Batches
from april_rl.training.recorded_steps import RecordedStep
from april_rl.training.runtime.worker_parts import Update, build_learner
from april_rl.types import ScoredGroup

if TYPE_CHECKING:
    from april_rl.training.learner.learner import Learner
    from april_rl.training.runtime.workers import LocalWorker


_MASTER = "master."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A learner, the function that makes its updates, and what makes its batches."""

    learner: Learner
    update: Update  # belongs to the learner
    batches: Batches
    packer: Packer
    watched: Watched  # the objective calls it

    def load(self, folder: Path) -> None:
        """Continue from what workers saved; raise TrainingStateError for another model."""
        self.learner.load_state(folder)

    def save(self, folder: Path) -> None:
        self.learner.snapshot().write(folder)

    def train(
        self, step: int, recorded: RecordedStep
    ) -> tuple[dict[str, float], list[TrainedResponse]]:
        """Make the update of a step. Return the metrics of update and batch, and what the update
        did with each response.
        """
        self.watched.clear()
        batch, _ = self.batches.make(
            recorded.groups,
            probes=recorded.probes,
            policy_version=step - 1,
            phase=lambda _: nullcontext(),
            look=lambda: None,
        )
        metrics = merge([batch.metrics, self.update(batch.of_rank(0))]).read()
        return metrics, self.watched.responses(recorded)

    def logprob(self, groups: Sequence[ScoredGroup]) -> float:
        """Return the mean log-probability of the tokens of groups of one sample, in nats."""
        batch = self.packer.pack(groups, [[0.0] for _ in groups], policy_version=0)
        rows = (row for part in batch.of_rank(0) for row in part)
        return float(torch.cat([self.learner.logprobs(row) for row in rows]).mean())

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of every trained weight on the host."""
        shards = self.learner.snapshot().shards
        return {name: shard.values for name, shard in shards.items() if name.startswith(_MASTER)}


@contextmanager
def trainee(settings: TrainConfig) -> Iterator[Trainee]:
    """Yield the learner of these settings, as the only worker of a run in this process. Raise
    RunError for a teacher on a server.
    """
    if settings.teacher.base_url:
        raise RunError("a teacher on a server (teacher.base_url) is not asked again")
    runtime = replace(settings.runtime, ray=False, num_workers=1, ray_address=None)
    engine = replace(settings.engine, tensor_parallel_size=1)
    whole = replace(settings.learner, shard_size=None, offload=Offload.none)
    alone = replace(settings, runtime=runtime, engine=engine, learner=whole, resume=None)
    draft = draft_training(alone, facts_of(alone, machine_of(alone), trains=True))
    models = models_of(draft, trains=True)
    with TemporaryDirectory(prefix="april_rl_replay_") as folder:
        workers = build_workers(draft.config, draft.layout, run_dir=Path(folder), sizes=draft.sizes)
        worker = cast("LocalWorker", workers).worker
        plan = plan_training(draft, models, workers.memory())
        timeout_s = plan.config.runtime.stall_timeout_s
        worker.join(worker.listen(1), rank=0, world_size=1, timeout_s=timeout_s)
        try:
            watched, device = Watched(), plan.layout.device
            learner, update = build_learner(plan.config, device=device, watch=watched)
            batches = build_batches(plan, models.policy, None)
            hidden_size = models.policy.hidden_size
            packer = build_packer(plan.config, num_ranks=1, hidden_size=hidden_size)
            yield Trainee(
                learner=learner, update=update, batches=batches, packer=packer, watched=watched
            )
        finally:
            worker.close()
