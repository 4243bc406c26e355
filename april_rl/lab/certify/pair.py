"""A learner and an engine in this process, planned, loaded and called as a run's worker is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from april_rl.config import TrainConfig
from april_rl.lab.certify.reference import Distance
from april_rl.start.assembly.packer import build_packer
from april_rl.start.assembly.workers import build_workers, machine_of
from april_rl.start.planning.plan import draft_training, facts_of, models_of, plan_training
from april_rl.training.batch.packing import Batch
from april_rl.training.learner.mesh import Site
from april_rl.training.learner.mismatch import DEPTHS
from april_rl.training.learner.model.checkpoint import local_folder
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow
from april_rl.training.rollout.requests import Request, Requests, Sampling
from april_rl.types import Group, Prompt, Sample, ScoredGroup

if TYPE_CHECKING:
    from april_rl.training.engine.vllm_engine import VllmEngine
    from april_rl.training.runtime.workers import LocalWorker

_ALL_STEPS = 1_000_000
Say = Callable[[str], None]


class Pair:
    """The only worker of a run."""

    def __init__(
        self, settings: TrainConfig, prompts: Sequence[Prompt], folder: Path, *, say: Say
    ) -> None:
        """Plan and load as a run with runtime.ray=false does."""
        draft = draft_training(settings, facts_of(settings, machine_of(settings), trains=True))
        models = models_of(draft, trains=True)
        workers = build_workers(draft.config, draft.layout, run_dir=folder, sizes=draft.sizes)
        self.workers = cast("LocalWorker", workers)
        plan = plan_training(draft, models, workers.memory())
        self.config, self.sleeps = plan.config, plan.engines_sleep
        workers.start(plan.config, sleeps=plan.engines_sleep, on_stage=say)
        self._site = Site.of(self.config.learner, device=plan.layout.device)
        self._packer = build_packer(self.config, num_ranks=1, hidden_size=models.policy.hidden_size)
        self.compute_dtype = self._site.compute_dtype
        self.temperature = self.config.rollout.temperature
        self._prompts, self._runs = prompts, count()  # each run gives its requests other seeds

    @property
    def engine(self) -> VllmEngine:
        return cast("VllmEngine", self.workers.worker.engine)

    def gradients(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return the gradient of the sum of all log-probabilities in one packed row, by parameter,
        of the model without adapters.
        """
        policy = Policy.build(
            local_folder(self.config.model.path),
            self._site,
            activation_checkpointing=self.config.learner.recomputed_share,
            temperature=self.temperature,
        )
        policy(self._row(samples))[0].sum().backward()
        found = ((name, each.grad) for name, each in policy.named_parameters())
        return {name: grad.full_tensor().cpu() for name, grad in found if isinstance(grad, DTensor)}

    def sample(
        self, *, parts: int = 1, keeps: bool = False, sampling: Sampling | None = None
    ) -> tuple[list[Sample], int]:
        """Return a response to each prompt, and the tokens prefilled for its last part; with two
        `parts` the engine is emptied half-way, and with `keeps` it may keep the KV cache meanwhile.
        """
        budget, run = self.config.rollout.max_response_tokens, next(self._runs)
        samples, prefilled = [Sample(prompt, 0) for prompt in self._prompts], 0
        for max_steps in [budget // parts] * (parts - 1) + [_ALL_STEPS]:
            requests = _requests([s for s in samples if not s.finish_reason], run, budget, sampling)
            tick = self.engine.advance(requests, slots=len(self._prompts), max_steps=max_steps)
            found = {each.sample_id: (each,) for each in (*tick.finished, *self.engine.abort())}
            samples = [Sample(s.prompt, 0, s.spans + found.get(s.id, ())) for s in samples]
            prefilled = tick.prefilled_tokens
            if not keeps:
                self.engine.release_parked()
        return samples, prefilled

    def mismatch(self, samples: Sequence[Sample]) -> Distance:
        """Return how far the log-probabilities of `samples` are from the learner's; the mean is
        that at the worst depth in the context.
        """
        self.workers.worker.learner.reload()
        found = self.workers.worker.learner.compare([self._row(samples)]).read()
        means = (found.get(f"mismatch/to_{depth}_tokens", 0.0) for depth in DEPTHS)
        return Distance(max(means), found["mismatch/logprob_abs_max"])

    def update(self, samples: Sequence[Sample]) -> None:
        """Train on samples whose credits have both signs, and send the weights to the engine."""
        self.workers.update(self._pack(samples, credits=[1.0, -1.0] * len(samples)))
        self.workers.sync_weights(self.engine.policy_version + 1)

    def _row(self, samples: Sequence[Sample]) -> PackedRow:
        """Return samples in one packed row, each with the credit 1."""
        [[micro_batch]] = self._pack(samples, credits=[1.0] * len(samples)).of_rank(0)
        return PackedRow.of(micro_batch, device=self._site.device)

    def _pack(self, samples: Sequence[Sample], *, credits: Sequence[float]) -> Batch:
        groups = [
            ScoredGroup(group=Group(prompt=s.prompt, samples=(s,)), rewards=(0.0,)) for s in samples
        ]
        version = samples[0].completions[-1].policy_version
        paid = [[credit] for credit in credits[: len(samples)]]
        return self._packer.pack(groups, paid, policy_version=version)


def _requests(
    samples: Sequence[Sample], run: int, budget: int, sampling: Sampling | None
) -> list[Request]:
    return Requests(
        run,
        [sample.prompt.id for sample in samples],
        [sample.index for sample in samples],
        [sample.prompt.token_ids for sample in samples],
        [budget - sample.end for sample in samples],
        [tuple(span.token_ids for span in sample.spans) for sample in samples],
        sampling=sampling,
    ).each()


def with_logprobs(samples: Sequence[Sample], logprobs: Sequence[Tensor]) -> list[Sample]:
    """Return samples as if they had been sampled with these log-probabilities, in one part."""
    found = []
    for sample, values in zip(samples, logprobs, strict=True):
        last, token_ids = sample.completions[-1], sample.token_ids
        whole = replace(last, start=0, token_ids=token_ids, logprobs=tuple(values.tolist()))
        found.append(Sample(sample.prompt, 0, (whole,)))
    return found
