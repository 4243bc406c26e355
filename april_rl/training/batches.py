"""The batch of a step: from scored groups to packed rows, as the algorithm pays each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.metrics import Histogram, Metrics
from april_rl.training.algorithm.advantages import Credits, Floats64, soft_overlong_penalty
from april_rl.training.batch.packing import Batch, Floats32, Packer
from april_rl.types import Sample, SampleId, ScoredGroup


class TeacherReply(NamedTuple):
    """The log-probabilities that a teacher gives to the samples of a step."""

    logprobs: Mapping[SampleId, Floats32]  # [R], nats
    metrics: Metrics


# Asks a teacher that is not in the workers; calls the second argument every second.
AskTeacher = Callable[[Sequence[ScoredGroup], Callable[[], None]], TeacherReply]


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
        self._config, self._packer = config, packer
        self._credits_of, self._ask_teacher = credits_of, ask_teacher

    def make(
        self,
        groups: Sequence[ScoredGroup],
        *,
        probes: Sequence[Sample],
        policy_version: int,
        phase: Callable[[str], AbstractContextManager[object]],
        look: Callable[[], None],
    ) -> tuple[Batch, Sequence[Sequence[float | Floats64]] | None]:
        """Return the batch that advances the policy from `policy_version`, and the advantages, None
        if a critic estimates them. `probes` are only compared with the engine. What `look` raises
        while a teacher is asked ends the call.
        """
        algorithm = self._config.algorithm
        rewards = [
            np.array(scored.rewards)
            + soft_overlong_penalty(
                [sample.num_tokens for sample in scored.group.samples],
                max_response_tokens=self._config.rollout.max_response_tokens,
                buffer_frac=algorithm.overlong_buffer_frac,
                penalty=algorithm.overlong_penalty,
            )
            for scored in groups
        ]
        credits_, reply = self._credits_of(groups, rewards), TeacherReply({}, Metrics())
        if self._ask_teacher is not None:
            with phase("teacher"):
                reply = self._ask_teacher(groups, look)
        batch = self._packer.pack(
            groups,
            credits_,
            policy_version=policy_version,
            probes=probes,
            teacher_logprobs=reply.logprobs,
        )
        metrics = Metrics({**batch.metrics, **reply.metrics})
        if algorithm.advantage == Advantage.gae:
            return replace(batch, metrics=metrics), None
        every = np.hstack([each for of_group in credits_ for each in of_group])
        histogram = {"histogram/advantage": Histogram.of(every)}
        return replace(batch, metrics=Metrics({**metrics, **histogram})), credits_
