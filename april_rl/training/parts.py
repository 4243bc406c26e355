"""The parts of a run that the trainer uses; `start/assembly` builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from april_rl.metrics import Metrics
from april_rl.types import SampleId, ScoredGroup

if TYPE_CHECKING:
    from april_rl.run.checkpointing.checkpointer import Checkpointer
    from april_rl.run.tracking.terminal import View
    from april_rl.run.tracking.tracker import Tracker
    from april_rl.training.algorithm.advantages import Advantages
    from april_rl.training.batch.packing import Floats32, Packer
    from april_rl.training.rollout.collector import Collector
    from april_rl.training.runtime.local import LocalWorker
    from april_rl.training.runtime.workers import Workers


class TeacherReply(NamedTuple):
    """The log-probabilities that a teacher gives to the samples of a step."""

    logprobs: Mapping[SampleId, Floats32]  # [R], nats
    metrics: Metrics


class Scoring(Protocol):
    """Rewards and environments: what a checkpoint keeps of them, and what they counted last."""

    def save(self) -> Mapping[str, Any]: ...
    def metrics(self) -> Metrics: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Parts of a run that the trainer uses."""

    view: View
    take_over: Callable[[View], Tracker]  # the run has not taken over its directory yet
    decode: Callable[[Sequence[int]], str]
    outside: Scoring
    workers: Workers | LocalWorker
    save_prompts: Callable[[], Mapping[str, Any]]
    model: Mapping[str, Any]  # the facts that must stay the same when the run resumes
    checkpointer: Checkpointer
    collector: Collector
    packer: Packer
    evaluate: Callable[..., Metrics]  # `evaluate_all` with its held-out sets
    advantages: Advantages
    # Asks a teacher that is not in the workers; calls the second argument every second.
    teacher: Callable[[Sequence[ScoredGroup], Callable[[], None]], TeacherReply] | None = None
