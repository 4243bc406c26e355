"""Responses to held-out prompts, with the run's own engines and reward."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from april_rl.evaluation.held_out import EvaluationError, HeldOut, Outcome
from april_rl.metrics import Metrics
from april_rl.rollout.ports import Engines, Scorer
from april_rl.rollout.requests import Requests
from april_rl.types import Completion, Prompt, Sample, SampleId, Sampling, Score


class CountingScorer(Scorer, Protocol):
    """A scorer that counts what goes wrong."""

    def metrics(self) -> Metrics:
        """`reward/*`, counted since the last call."""


class Evaluator:
    """Samples k responses to every prompt of a held-out set and scores them."""

    def __init__(
        self,
        engines: Engines,
        scorer: CountingScorer,
        *,
        temperature: float,
        num_slots: int,
        tick_steps: int,
        tick_timeout_s: float,
        seed: int,
    ) -> None:
        """`temperature` is the engines' own; `num_slots`: requests computed together over all
        engines. Engines and scorer must be idle at each call, and what the scorer has counted
        taken.
        """
        self._engines, self._scorer = engines, scorer
        self._temperature = temperature
        self._slots = -(-num_slots // engines.num_engines)
        self._tick_steps, self._tick_timeout_s = tick_steps, tick_timeout_s
        self._seed = seed

    def run(self, held_out: HeldOut, on_progress: Callable[[int], None]) -> Outcome:
        """Return every response with its reward; `on_progress` gets the number of finished samples.

        The same seeds every time, so two evaluations differ by the policy alone. A sample whose
        reward failed has none; whatever else the scorer counted stands beside it, and not in the
        next step of training. Raises EvaluationError when samples are missing.
        """
        # Ids below zero, so that no held-out prompt is taken for one of the stream.
        prompts = {-1 - i: replace(prompt, id=-1 - i) for i, prompt in enumerate(held_out.prompts)}
        samples = self._generate(held_out, prompts, on_progress)
        _check_whole(held_out, samples)
        for sample in samples:
            self._scorer.submit(sample, group_size=held_out.sampling.num_samples)
        rewards = np.full((len(prompts), held_out.sampling.num_samples), math.nan)
        for score in self._scorer.collect(None):
            if score.is_valid:
                row, column = -1 - score.sample_id.prompt_id, score.sample_id.index
                rewards[row, column] = _deciding_value(score, held_out)
        return Outcome(
            held_out=held_out,
            samples=tuple(samples),
            rewards=rewards,
            counts=self._scorer.metrics(),
        )

    def _generate(
        self, held_out: HeldOut, prompts: dict[int, Prompt], on_progress: Callable[[int], None]
    ) -> list[Sample]:
        waiting = deque(
            SampleId(prompt_id, index)
            for prompt_id in prompts
            for index in range(held_out.sampling.num_samples)
        )
        blank = self._blank_requests(held_out)
        samples: list[Sample] = []
        for completion in self._completions(waiting, prompts, blank):
            prompt_id, index = completion.sample_id
            sample = Sample(prompt=prompts[prompt_id], index=index, completions=(completion,))
            samples.append(sample)
            on_progress(len(samples))
        return sorted(samples, key=lambda sample: (-sample.prompt.id, sample.index))

    def _completions(
        self, waiting: deque[SampleId], prompts: dict[int, Prompt], blank: Requests
    ) -> Iterable[Completion]:
        """Everything to the end: each engine is given as many as it has slots for."""
        room = [self._slots] * self._engines.num_engines
        while waiting or min(room) < self._slots:
            for engine, free in enumerate(room):
                taken = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                room[engine] -= len(taken)
                if room[engine] < self._slots:
                    self._engines.launch(
                        engine,
                        _requests(taken, prompts, blank),
                        slots=self._slots,
                        max_steps=self._tick_steps,
                    )
            busy = sum(free < self._slots for free in room)
            while busy:
                for engine, tick in self._engines.wait(self._tick_timeout_s):
                    busy -= 1
                    room[engine] += len(tick.finished)
                    yield from tick.finished

    def _blank_requests(self, held_out: HeldOut) -> Requests:
        """What all requests of a set have in common."""
        chosen = held_out.sampling
        is_as_in_training = chosen.temperature == self._temperature and chosen.top_p == 1
        return Requests(
            max_response_tokens=chosen.max_response_tokens,
            run_seed=self._seed,
            sampling=None if is_as_in_training else Sampling(chosen.temperature, chosen.top_p),
        )


def _requests(
    sample_ids: Sequence[SampleId], prompts: Mapping[int, Prompt], blank: Requests
) -> Requests:
    """For samples that are empty; `prompts` by id."""
    return blank._replace(
        prompt_ids=[prompt_id for prompt_id, _ in sample_ids],
        indices=[index for _, index in sample_ids],
        prompt_token_ids=[prompts[prompt_id].token_ids for prompt_id, _ in sample_ids],
        parts=[()] * len(sample_ids),
    )


def _check_whole(held_out: HeldOut, samples: Sequence[Sample]) -> None:
    """Raise EvaluationError unless every prompt has its k finished samples.

    A missing one would count as wrong, and the figure would fall with k.
    """
    wanted = held_out.sampling.num_samples
    finished = Counter(sample.id for sample in samples if sample.is_finished)
    for place, prompt in enumerate(held_out.prompts):
        found = [finished[SampleId(-1 - place, index)] for index in range(wanted)]
        if found != [1] * wanted:
            raise EvaluationError(
                f"evaluation.sets.{held_out.name}: the engines gave {sum(found)} of {wanted} "
                f"samples of the prompt at {prompt.source}; no figure is taken from it"
            )


def _deciding_value(score: Score, held_out: HeldOut) -> float:
    """Return what the function that says which samples are right gave."""
    if not score.parts:
        return score.value
    return dict(score.parts)[held_out.function]
