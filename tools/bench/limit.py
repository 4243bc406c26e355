"""The limit of the rollout benchmark: an engine that always has work and is never aborted."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable

from april_rl.training.rollout.requests import Request, request_seed
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Sample, SampleId
from bench.modes import DrawnLengthsEngine, KeepingEngine, Prompts, Slice, lengths_of

_PREFILL_STEPS = 12  # enough to restore every sample of the limit before the clock starts
_LIMIT_STEP_S = 1.5  # a slice of the limit lasts about as long as one of the collector


class Limit:
    """An engine that always has work and is never aborted, with `factor`·N·G samples in flight.

    Other modes use the engine in between, so its samples are resumed before the clock starts.
    """

    name = "limit"

    def __init__(self, args: argparse.Namespace, engine: KeepingEngine, *, factor: float) -> None:
        """Keep samples in flight from one round to the next."""
        self.factor = factor
        self.engine = DrawnLengthsEngine(engine, lengths_of(args), keeps=False)
        self._args = args
        self._slots = round(factor * args.num_groups * args.group_size)
        self._prompts, self._held = Prompts(90), deque[Sample]()

    def run(self, steps: int, between: Callable[[], None]) -> Slice:
        """Run for about as long as `steps` steps of a collector take."""
        self.engine.release_parked()
        between()
        self.engine.name_version(0)
        live: dict[SampleId, Sample] = {}
        self._advance(live, _PREFILL_STEPS)
        ticks: list[Tick] = []
        started = time.perf_counter()
        while time.perf_counter() - started < steps * _LIMIT_STEP_S:
            ticks.append(self._advance(live, self._args.tick_steps))
        time_s = time.perf_counter() - started
        for completion in self.engine.abort():
            sample = live[completion.sample_id]
            self._held.append(sample.with_span(completion) if completion.token_ids else sample)
        slot_steps = sum(tick.slot_steps for tick in ticks)
        engine_steps = sum(tick.engine_steps for tick in ticks)
        finished = sum(len(tick.finished) for tick in ticks)
        return Slice(
            time_s=time_s,
            finished=finished,
            trained=finished,
            generated=sum(tick.generated_tokens for tick in ticks),
            slot_s=time_s * self._slots,
            occupied_slot_s=time_s * slot_steps / engine_steps,
        )

    def _advance(self, live: dict[SampleId, Sample], max_steps: int) -> Tick:
        """Run a tick after filling the queue."""
        submit = []
        while len(live) < self._slots + self._slots // 4:
            if not self._held:
                prompt = self._prompts.take()
                indices = range(self._args.group_size)
                self._held.extend(Sample(prompt=prompt, index=i) for i in indices)
            sample = self._held.popleft()
            live[sample.id] = sample
            submit.append(self._request(sample))
        tick = self.engine.advance(submit, slots=self._slots, max_steps=max_steps)
        for completion in tick.finished:
            del live[completion.sample_id]
        return tick

    def _request(self, sample: Sample) -> Request:
        return Request(
            sample_id=sample.id,
            prompt_token_ids=sample.prompt.token_ids,
            parts=tuple(completion.token_ids for completion in sample.completions),
            start=sample.num_tokens,
            max_tokens=self._args.max_response_tokens - sample.num_tokens,
            seed=request_seed(0, sample.id, len(sample.completions)),
        )
