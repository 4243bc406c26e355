"""Sample and score responses to held-out prompts, with the run's own engines and reward."""

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
from april_rl.rollout.ticks import TickWork
from april_rl.types import Completion, Prompt, Sample, SampleId, Sampling


class CountingScorer(Scorer, Protocol):
    """A scorer that also counts failures."""

    def metrics(self) -> Metrics:
        """Return `reward/*`, counted since the last call."""


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
        """Store the settings.

        `temperature` is the engines' own; `num_slots` is the number of requests computed together
        over all engines. Engines and scorer must be idle at each call, and the scorer's counts
        already taken.
        """
        self._engines, self._scorer = engines, scorer
        self._temperature = temperature
        self._slots = -(-num_slots // engines.num_engines)
        self._tick_steps, self._tick_timeout_s = tick_steps, tick_timeout_s
        self._seed = seed
        self.work: list[TickWork] = []  # of every tick so far

    def run(self, held_out: HeldOut, on_progress: Callable[[int], None]) -> Outcome:
        """Return every response with its reward; call `on_progress` with the number of finished
        samples.

        Seeds are the same every time, so two evaluations differ by the policy alone. Where the
        reward or the engine failed, it is NaN; the scorer's other counts are in the result, not
        in the next training step. Raises EvaluationError when samples are missing.
        """
        # Negative ids, so that no held-out prompt is mistaken for a training prompt.
        prompts = {-1 - i: replace(prompt, id=-1 - i) for i, prompt in enumerate(held_out.prompts)}
        samples = self._generate(held_out, prompts, on_progress)
        _check_whole(held_out, samples)
        for sample in samples:
            self._scorer.submit(sample, group_size=held_out.sampling.num_samples)
        failed = {sample.id for sample in samples if sample.is_failed}
        rewards = np.full((len(prompts), held_out.sampling.num_samples), math.nan)
        for score in self._scorer.collect(None):
            if score.value is not None and score.sample_id not in failed:
                row, column = -1 - score.sample_id.prompt_id, score.sample_id.index
                parts = dict(score.parts)  # empty with a single reward function
                rewards[row, column] = parts[held_out.function] if parts else score.value
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
        """Yield all completions; each engine gets as many requests as it has slots."""
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
                    self.work.append(TickWork.of(tick))
                    room[engine] += len(tick.finished)
                    yield from tick.finished

    def _blank_requests(self, held_out: HeldOut) -> Requests:
        """Return a request batch with what all requests of a set have in common."""
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
    """Return the requests of samples without tokens; `prompts` by id."""
    return blank._replace(
        prompt_ids=[prompt_id for prompt_id, _ in sample_ids],
        indices=[index for _, index in sample_ids],
        prompt_token_ids=[prompts[prompt_id].token_ids for prompt_id, _ in sample_ids],
        parts=[()] * len(sample_ids),
    )


def _check_whole(held_out: HeldOut, samples: Sequence[Sample]) -> None:
    """Raise EvaluationError unless every prompt has its k finished samples.

    A missing sample would count as wrong and lower the figure.
    """
    wanted = held_out.sampling.num_samples
    finished = Counter(sample.id for sample in samples if sample.is_finished)
    for place, prompt in enumerate(held_out.prompts):
        found = [finished[SampleId(-1 - place, index)] for index in range(wanted)]
        if found != [1] * wanted:
            raise EvaluationError(
                f"evaluation.sets.{held_out.name}: the engines gave {sum(found)} of {wanted} "
                f"samples of the prompt at {prompt.source}; the set is not evaluated"
            )
