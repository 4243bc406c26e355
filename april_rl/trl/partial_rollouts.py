"""Partial rollouts for TRL's `GRPOTrainer` (1.16).

TRL asks for completions of the prompts that its sampler drew. Here a step returns the ready
groups from the same stream of prompts, and their rows replace TRL's before it reads them.
Rewards, advantages and loss stay TRL's; its importance sampling weighs tokens by the policies
that sampled them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from april_rl.run.checkpointing.columns import read_state, write_state
from april_rl.training.rollout.codec import Plain, restore_ready_group, save_ready_group
from april_rl.training.rollout.collector import Collection, Collector
from april_rl.training.rollout.dispatch import RequestRules
from april_rl.training.rollout.in_process import SerialEngines
from april_rl.training.rollout.step import StepRules
from april_rl.trl.checks import TrlError, check_sampling, check_trainer, max_tokens_of
from april_rl.trl.engine import TrlEngine
from april_rl.trl.rows import NoRewards, Rows
from april_rl.types import Sample, ScoredGroup

_NEVER_S = 1e9
_TICK_STEPS = 8
# These metrics are logged as maxima over the processes, all others as means.
_LARGEST = ("age_max", "rollout_s")


def with_partial_rollouts(
    trainer: GRPOTrainer,
    *,
    over_sampling_factor: float = 1.5,
    refill: bool = True,
    max_staleness: int = 8,
) -> None:
    """Let `trainer` generate with partial rollouts from now on; evaluation stays as it is.

    `over_sampling_factor` is the number of samples in flight ÷ the samples that a batch needs; with
    1 and `refill` false TRL generates as without this call. No token is older than `max_staleness`
    batches. Raise TrlError naming the argument that does not fit.
    """
    check_trainer(trainer, over_sampling_factor)
    check_sampling(trainer, is_synchronous=over_sampling_factor == 1 and not refill)
    rollouts = PartialRollouts(
        trainer, factor=over_sampling_factor, refill=refill, max_staleness=max_staleness
    )
    trainer._generate_and_score_completions = functools.partial(
        _score_own_rows, rollouts, trainer._generate_and_score_completions
    )
    trainer._generate_single_turn = functools.partial(
        _give_completions, rollouts, trainer._generate_single_turn
    )
    trainer._load_optimizer_and_scheduler = functools.partial(
        _restore_too, rollouts, trainer._load_optimizer_and_scheduler
    )
    trainer._save_checkpoint = functools.partial(_save_too, rollouts, trainer._save_checkpoint)


def _score_own_rows(
    rollouts: PartialRollouts, score: Callable[..., Any], inputs: list[dict[str, Any]]
) -> Any:  # noqa: ANN401
    return score(rollouts.next_rows() if rollouts.is_training else inputs)


def _give_completions(
    rollouts: PartialRollouts,
    generate: Callable[..., Any],
    prompt_ids: list[list[int]],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    if rollouts.is_training:
        return rollouts.completions(prompt_ids)
    return generate(prompt_ids, *args, **kwargs)


def _restore_too(
    rollouts: PartialRollouts, load: Callable[..., None], checkpoint: str | None
) -> None:
    load(checkpoint)
    if checkpoint is not None:
        rollouts.restore(Path(checkpoint))


def _save_too(
    rollouts: PartialRollouts,
    save: Callable[..., None],
    *args: Any,  # noqa: ANN401
) -> None:
    # These are written first, so that a checkpoint with all of TRL's files has them too, even if
    # the run is killed.
    rollouts.save()
    save(*args)


class PartialRollouts:
    """The collector of a trainer, and the completions that TRL is about to ask for."""

    def __init__(
        self, trainer: GRPOTrainer, *, factor: float, refill: bool, max_staleness: int
    ) -> None:
        """Begin at the first prompt."""
        self._trainer = trainer
        args = trainer.args
        num_samples = args.per_device_train_batch_size * args.steps_per_generation
        self._rules = StepRules(
            num_groups=num_samples // trainer.num_generations,
            group_size=trainer.num_generations,
            refill=refill,
            max_staleness=max_staleness,
            finish_stale=True,
            max_rejected_groups=0,
            requests=RequestRules(
                tick_steps=_TICK_STEPS,
                max_response_tokens=max_tokens_of(trainer),
                seed=args.seed,
            ),
            abort_timeout_s=_NEVER_S,
            tick_timeout_s=_NEVER_S,
            deterministic=True,
        )
        self._factor = factor
        self._engine = TrlEngine(trainer)
        self._begin(num_taken=0)
        self._batch: list[ScoredGroup] = []  # the last batch
        # Whether the batch comes from a checkpoint that had not trained all of it.
        self._is_restored = False
        self._samples: list[Sample] = []  # samples of the batch, until TRL has their tokens

    @property
    def is_training(self) -> bool:
        """Return whether TRL trains, and does not evaluate."""
        return bool(self._trainer.model.training)

    def _begin(self, *, num_taken: int) -> None:
        self._rows = Rows(self._trainer, num_groups=self._rules.num_groups, num_taken=num_taken)
        self._collector = Collector(
            SerialEngines([self._engine]),
            NoRewards(),
            self._rows,
            self._rules,
            over_sampling_factor=self._factor,
        )

    def next_rows(self) -> list[dict[str, Any]]:
        """Generate a batch, unless one was restored; return the row of each of its samples."""
        if not self._is_restored:
            self._generate()
        self._is_restored = False
        self._samples = [s for scored in self._batch for s in scored.group.samples]
        return [self._rows.of(sample) for sample in self._samples]

    def _generate(self) -> None:
        trainer = self._trainer
        if trainer.state.global_step != trainer._last_loaded_step:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        with self._engine.awake():
            collection = self._collector.collect(self._engine.policy_version)
        self._engine.policy_version += 1
        self._batch = list(collection.groups)
        self._log(collection)

    def completions(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and behaviour log-probabilities of the batch's samples."""
        assert [list(s.prompt.token_ids) for s in self._samples] == prompt_ids
        samples, self._samples = self._samples, []
        return [[*s.token_ids] for s in samples], [[*s.behaviour_logprobs] for s in samples]

    def save(self) -> None:
        """Write the groups that are not fully trained into TRL's checkpoint, in every process."""
        trainer = self._trainer
        folder = Path(
            trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        )
        folder.mkdir(parents=True, exist_ok=True)
        num_uses = trainer.args.steps_per_generation * trainer.num_iterations
        unfinished = self._batch if trainer._step % num_uses else []
        state: Plain = {
            "num_processes": trainer.accelerator.num_processes,
            "num_taken": self._rows.num_taken,
            "policy_version": self._engine.policy_version,
            "collector": self._collector.save(),
            "batch": [save_ready_group(group) for group in unfinished],
        }
        write_state(state, folder, self._name)
        trainer.accelerator.wait_for_everyone()

    def restore(self, folder: Path) -> None:
        """Continue where a checkpoint was written; raise RunError if it does not fit."""
        state = read_state(folder, self._name)
        num_processes = self._trainer.accelerator.num_processes
        saved = (state["num_processes"], state["collector"]["num_groups"])
        if saved != (num_processes, self._rules.num_groups):
            raise TrlError(
                f"{folder} was saved by {saved[0]} processes with {saved[1]} prompts of a batch in "
                f"each; this run has {num_processes} with {self._rules.num_groups}: resume with "
                "the same numbers, because they decide which process gets which rows"
            )
        self._engine.policy_version = state["policy_version"]
        self._engine.abort()  # drop the rest of an interrupted rollout of this process
        self._trainer._step = 0  # otherwise TRL would continue in the interrupted batch
        self._begin(num_taken=state["num_taken"])
        self._collector.restore(state["collector"])
        self._batch = [restore_ready_group(group) for group in state["batch"]]
        self._is_restored = bool(self._batch)

    @property
    def _name(self) -> str:
        return f"april_rl_{self._trainer.accelerator.process_index}"

    def _log(self, collection: Collection) -> None:
        record = collection.record
        samples = [s for scored in collection.groups for s in scored.group.samples]
        ages = [record.policy_version - v for s in samples for v in s.policy_versions]
        logged = {
            "age_mean": sum(ages) / len(ages),
            "age_max": max(ages),
            "off_policy_frac": sum(age > 0 for age in ages) / len(ages),
            "resumed_frac": sum(len(s.completions) > 1 for s in samples) / len(samples),
            "rollout_s": record.time_s,
            "samples_per_s": record.finished_samples / record.time_s,
            "occupancy": record.in_flight_mean / record.num_slots,
        }
        accelerator = self._trainer.accelerator
        own = torch.tensor([[*logged.values()]], dtype=torch.float32, device=accelerator.device)
        everywhere = accelerator.gather(own)  # [processes, len(logged)]
        for column, name in enumerate(logged):
            values = everywhere[:, column]
            value = values.max() if name in _LARGEST else values.mean()
            self._trainer._metrics["train"][f"april/{name}"].append(value.item())
