"""The batch of a step: from scored groups to packed rows, as the algorithm pays each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.metrics import Metrics
from april_rl.training.algorithm.advantages import Credits, Floats64, penalized_rewards
from april_rl.training.batch.packing import Batch, Floats32, Packer
from april_rl.training.rollout.collector import Collection
from april_rl.types import SampleId, ScoredGroup


class TeacherReply(NamedTuple):
    """The log-probabilities that a teacher gives to the samples of a step."""

    logprobs: Mapping[SampleId, Floats32]  # [R], nats
    metrics: Metrics


# Asks a teacher that is not in the workers; calls the second argument every second.
AskTeacher = Callable[[Sequence[ScoredGroup], Callable[[], None]], TeacherReply]
Phase = Callable[[str], AbstractContextManager[object]]


class StepBatch(NamedTuple):
    """The batch of a step, and what it was made from."""

    batch: Batch
    # [G] of each group: of a sample or of each of its tokens [R]. None: a critic estimates them.
    advantages: Sequence[Sequence[float | Floats64]] | None
    metrics: Metrics


class Batches:
    """Makes the batch of each step."""

    def __init__(
        self,
        config: TrainConfig,
        packer: Packer,
        credits_of: Credits,
        ask_teacher: AskTeacher | None = None,
    ) -> None:
        """Pay samples as `credits_of` says for their rewards, and ask a teacher on a server."""
        self._packer, self._credits_of = packer, credits_of
        self._max_response_tokens = config.rollout.max_response_tokens
        self._buffer_frac = config.algorithm.overlong_buffer_frac
        self._penalty = config.algorithm.overlong_penalty
        self._has_critic = config.algorithm.advantage == Advantage.gae
        self._ask_teacher = ask_teacher

    def make(
        self,
        collection: Collection,
        *,
        policy_version: int,
        phase: Phase,
        look: Callable[[], None],
    ) -> StepBatch:
        """Return the batch that advances the policy from `policy_version`. What `look` raises while
        a teacher is asked ends the call.
        """
        rewards = penalized_rewards(
            collection.groups,
            max_response_tokens=self._max_response_tokens,
            buffer_frac=self._buffer_frac,
            penalty=self._penalty,
        )
        credits_ = self._credits_of(collection.groups, rewards)
        reply = TeacherReply({}, Metrics())
        if self._ask_teacher is not None:
            with phase("teacher"):
                reply = self._ask_teacher(collection.groups, look)
        batch = self._packer.pack(
            collection.groups,
            credits_,
            policy_version=policy_version,
            probes=collection.probes,
            teacher_logprobs=reply.logprobs,
        )
        metrics = Metrics({**batch.metrics, **reply.metrics})
        return StepBatch(batch, None if self._has_critic else credits_, metrics)
