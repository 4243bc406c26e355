"""Accuracy on held-out prompts, with the run's own engines and reward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from april_rl.evaluation.estimators import avg_at_k, pass_at_k
from april_rl.metrics import Metrics
from april_rl.rollout.ports import Engines, Scorer
from april_rl.rollout.requests import Requests
from april_rl.types import Completion, Prompt, Sample, SampleId


class CountingScorer(Scorer, Protocol):
    """A scorer that counts what goes wrong."""

    def metrics(self) -> Metrics:
        """`reward/*`, counted since the last call."""


class Evaluator:
    """Samples k responses to every held-out prompt and scores them."""

    def __init__(
        self,
        engines: Engines,
        scorer: CountingScorer,
        *,
        num_samples: int,
        max_response_tokens: int,
        num_slots: int,
        tick_steps: int,
        tick_timeout_s: float,
        seed: int,
    ) -> None:
        """`num_slots`: requests computed together over all engines. Engines and scorer must be idle
        at each call, and what the scorer has counted taken.
        """
        self._engines, self._scorer = engines, scorer
        self._num_samples = num_samples
        self._max_response_tokens = max_response_tokens
        self._slots = -(-num_slots // engines.num_engines)
        self._tick_steps, self._tick_timeout_s = tick_steps, tick_timeout_s
        self._seed = seed

    def run(
        self, name: str, prompts: Sequence[Prompt], on_progress: Callable[[int], None]
    ) -> Metrics:
        """`eval/<name>/*`; `on_progress` gets the number of finished samples.

        The same seeds every time, so two evaluations differ by the policy alone. A sample whose
        reward failed counts as wrong, and in `eval/<name>/errors`; whatever else the scorer counted
        stands beside it, and not in the next step of training.
        """
        # Ids below zero, so that no held-out prompt is taken for one of the stream.
        held_out = {-1 - i: replace(prompt, id=-1 - i) for i, prompt in enumerate(prompts)}
        samples = self._generate(held_out, on_progress)
        for sample in samples:
            self._scorer.submit(sample)
        scores = self._scorer.collect(None)
        counted = self._scorer.metrics()
        rewards = np.zeros((len(prompts), self._num_samples))
        for score in scores:
            row = -1 - score.sample_id.prompt_id
            rewards[row, score.sample_id.index] = score.value if score.is_valid else 0.0
        return Metrics(
            {
                **{f"eval/{name}/{key.rpartition('/')[2]}": n for key, n in counted.items()},
                f"eval/{name}/avg_at_k": avg_at_k(rewards),
                f"eval/{name}/pass_at_k": pass_at_k(rewards, k=self._num_samples),
                f"eval/{name}/response_tokens_mean": float(
                    np.mean([s.num_tokens for s in samples])
                ),
                f"eval/{name}/truncated_frac": float(
                    np.mean([s.finish_reason == "length" for s in samples])
                ),
                f"eval/{name}/errors": float(sum(not score.is_valid for score in scores)),
            }
        )

    def _generate(
        self, prompts: dict[int, Prompt], on_progress: Callable[[int], None]
    ) -> list[Sample]:
        waiting = deque(
            SampleId(prompt_id, index)
            for prompt_id in prompts
            for index in range(self._num_samples)
        )
        samples: list[Sample] = []
        for completion in self._completions(waiting, prompts):
            prompt_id, index = completion.sample_id
            sample = Sample(prompt=prompts[prompt_id], index=index, completions=(completion,))
            samples.append(sample)
            on_progress(len(samples))
        return sorted(samples, key=lambda sample: (-sample.prompt.id, sample.index))

    def _completions(
        self, waiting: deque[SampleId], prompts: dict[int, Prompt]
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
                        self._requests([(prompts[prompt_id], index) for prompt_id, index in taken]),
                        slots=self._slots,
                        max_steps=self._tick_steps,
                    )
            busy = sum(free < self._slots for free in room)
            while busy:
                for engine, tick in self._engines.wait(self._tick_timeout_s):
                    busy -= 1
                    room[engine] += len(tick.finished)
                    yield from tick.finished

    def _requests(self, samples: Sequence[tuple[Prompt, int]]) -> Requests:
        """For samples that are empty: the prompt of each, and which of its samples it is."""
        return Requests(
            max_response_tokens=self._max_response_tokens,
            run_seed=self._seed,
            prompt_ids=[prompt.id for prompt, _ in samples],
            indices=[index for _, index in samples],
            prompt_token_ids=[prompt.token_ids for prompt, _ in samples],
            parts=[()] * len(samples),
        )
