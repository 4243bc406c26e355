"""Sample and score responses to held-out prompts, with the run's own engines and reward."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from april_rl.metrics import Metrics
from april_rl.task.evaluation.held_out import EvaluationError, HeldOut, ScoredSet
from april_rl.training.rollout.buffer import Buffer
from april_rl.training.rollout.dispatch import Dispatch, ExpectedLength, RequestRules
from april_rl.training.rollout.groups import Groups
from april_rl.training.rollout.ports import Engines, Outside
from april_rl.training.rollout.record import StepRecord
from april_rl.training.rollout.requests import Sampling
from april_rl.training.rollout.step import Step, StepRules
from april_rl.training.rollout.ticks import TickWork
from april_rl.types import Prompt, ScoredGroup


class CountingOutside(Outside, Protocol):
    """Rewards and environments that also count their failures."""

    def metrics(self) -> Metrics:
        """Return `reward/*`, counted since the last call."""

    def on_evaluation_end(self) -> None:
        """Record that an evaluation of all sets has ended."""


@dataclass(slots=True)
class Evaluator:
    """Samples k responses to every prompt of a held-out set and scores them, as a training step
    would if it trained the whole set.

    At each call, the engines and `outside` must be idle, and the counts of `outside` must have been
    read.
    """

    engines: Engines
    outside: CountingOutside
    temperature: float  # the one that the engines sample at
    num_slots: int  # requests that are computed together over all engines
    tick_steps: int
    tick_timeout_s: float
    seed: int
    work: list[TickWork] = field(default_factory=list, init=False)  # work of every tick so far

    def run(self, held_out: HeldOut, on_progress: Callable[[int], None]) -> ScoredSet:
        """Return every response with its reward; call `on_progress` with the number of samples of
        complete and scored groups.

        Seeds are the same every time, so two evaluations differ only by the policy. A reward is NaN
        if it or the engine failed. None of this counts in the metrics of the next training step.
        Raises EvaluationError when samples are missing.
        """
        groups = self._groups(held_out, on_progress)
        self.outside.metrics()  # discarded, so that they do not count in the next step
        _check_whole(held_out, groups)
        rewards = [_deciding_rewards(scored, held_out.function) for scored in groups]
        return ScoredSet(
            held_out=held_out,
            samples=tuple(sample for scored in groups for sample in scored.group.samples),
            rewards=np.array(rewards).reshape(-1, held_out.sampling.num_samples),
        )

    def end(self) -> None:
        self.outside.on_evaluation_end()

    def _groups(self, held_out: HeldOut, on_progress: Callable[[int], None]) -> list[ScoredGroup]:
        """Return a group for each prompt, in the order of the set."""
        # Ids are negative, so that no held-out prompt is mistaken for a training prompt.
        prompts = [replace(prompt, id=-1 - i) for i, prompt in enumerate(held_out.prompts)]
        group_size = held_out.sampling.num_samples
        rules = StepRules(
            num_groups=len(prompts),
            group_size=group_size,
            refill=True,
            max_staleness=0,
            finish_stale=False,
            max_rejected_groups=0,
            requests=self._request_rules(held_out),
            abort_timeout_s=self.tick_timeout_s,
            tick_timeout_s=self.tick_timeout_s,
            deterministic=False,  # the order in which scores arrive does not matter
        )
        record = StepRecord(policy_version=0, num_slots=self.num_slots, clock=time.perf_counter)
        dispatch = Dispatch(self.engines, rules.requests, ExpectedLength(), record)
        buffer = Buffer(group_size)
        step = Step(
            rules,
            record,
            dispatch=dispatch,
            buffer=buffer,
            groups=Groups(buffer, self.outside, keep=lambda _: True, failed=math.nan),
            outside=self.outside,
            prompts=_InOrder(prompts),
            may_open=True,
        )
        step.generate(lambda num_ready, _: on_progress(group_size * num_ready))
        while not dispatch.is_idle:  # never abort: that would release what is parked for training
            dispatch.wait(self.tick_timeout_s)
        self.work += [TickWork.of(tick) for _, tick in record.ticks]
        return sorted(buffer.ready_groups(), key=lambda scored: -scored.group.prompt.id)

    def _request_rules(self, held_out: HeldOut) -> RequestRules:
        chosen = held_out.sampling
        is_as_in_training = chosen.temperature == self.temperature and chosen.top_p == 1
        return RequestRules(
            tick_steps=self.tick_steps,
            max_response_tokens=chosen.max_response_tokens,
            seed=self.seed,
            sampling=None if is_as_in_training else Sampling(chosen.temperature, chosen.top_p),
        )


class _InOrder:
    """The prompts of a set, in order, each taken once."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = iter(prompts)

    def take(self) -> Prompt:
        return next(self._prompts)


def _deciding_rewards(scored: ScoredGroup, function: str) -> list[float]:
    """Return a group's rewards [k] from the function that decides; NaN for failed samples."""
    if not scored.parts:  # there is only one reward function
        return list(scored.rewards)
    return [
        reward if math.isnan(reward) else dict(parts)[function]
        for reward, parts in zip(scored.rewards, scored.parts, strict=True)
    ]


def _check_whole(held_out: HeldOut, groups: list[ScoredGroup]) -> None:
    """Raise EvaluationError unless every prompt has its samples: a missing one would count as wrong
    and lower the figure.
    """
    whole = {scored.group.prompt.id for scored in groups}
    for place, prompt in enumerate(held_out.prompts):
        if -1 - place not in whole:
            raise EvaluationError(
                f"evaluation.sets.{held_out.name}: the engines did not return all "
                f"{held_out.sampling.num_samples} samples of the prompt at {prompt.source}; the "
                "set is not evaluated"
            )
