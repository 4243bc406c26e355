"""The parts of a run that the trainer uses; `start/assembly` builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from april_rl.metrics import Metrics

if TYPE_CHECKING:
    from april_rl.run.checkpointing.checkpointer import Checkpointer
    from april_rl.run.tracking.terminal import View
    from april_rl.run.tracking.tracker import Tracker
    from april_rl.training.batches import Batches
    from april_rl.training.rollout.collector import Collector
    from april_rl.training.runtime.workers import Workers


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
    workers: Workers
    save_prompts: Callable[[], Mapping[str, Any]]
    model: Mapping[str, Any]  # the facts that must stay the same when the run resumes
    checkpointer: Checkpointer
    collector: Collector
    batches: Batches
    evaluate: Callable[..., Metrics]  # `evaluate_all` with its held-out sets
