"""What other over-sampling factors would have gained with a run's lengths and engine cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from april_rl.lab.report.run_files import RunFiles
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.recorded_run import RecordedRun, RecordedRunError, read_recorded_run
from april_rl.lab.simulator.scaled_down import scaled_down
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.rollout.collector import Collection
from april_rl.rollout.dispatch import auto_tick_steps
from april_rl.rollout.over_sampling import FixedFactor
from april_rl.rollout.timeline import Timeline, timeline_of

_FACTORS = (1.5, 2.0, 3.0)
_NUM_STEPS, _WARMUP_STEPS = 6, 4
NUM_FILES = 4  # of samples and timelines: samples of a large model take hundreds of MB a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Simulated samples per second of rollout, and one synchronous step."""

    synchronous: Timeline
    gains: dict[float, float]  # by α: samples/s of a step ÷ those of the synchronous loop
    is_scaled: bool  # simulated smaller than it was, with equal times

    @property
    def tail(self) -> tuple[float, float]:
        """Return (w, p): the share w of the synchronous rollout waits for the last share p of its
        samples, at the bend of the curve, where w − p is largest.
        """
        ended = sorted(span.ended_s for span in self.synchronous.spans)
        shares = (
            (1 - at_s / self.synchronous.time_s, 1 - number / len(ended))
            for number, at_s in enumerate(ended, start=1)
        )
        return max(shares, key=lambda share: share[0] - share[1])


def predict(run: RunFiles) -> Prediction | None:
    """Simulate the synchronous loop and some values of α; None if the run recorded too little."""
    try:
        recorded = read_recorded_run(run.run_dir, num_files=NUM_FILES)
    except RecordedRunError:
        return None
    scenario, lengths = _scenario(run, recorded), recorded.lengths
    small = scaled_down(scenario, lengths).scenario
    steps: list[Timeline] = []

    def keep(_: int, collection: Collection) -> None:
        steps.append(timeline_of(collection.record))

    base = simulate(
        small,
        over_sampling=FixedFactor(1.0),
        refill=False,
        num_steps=_NUM_STEPS,
        warmup_steps=0,
        on_step=keep,
    )
    rates = {
        factor: simulate(
            small,
            over_sampling=FixedFactor(factor),
            refill=True,
            num_steps=_NUM_STEPS,
            warmup_steps=_WARMUP_STEPS,
        )
        for factor in _factors(run)
        if factor - 1 <= scenario.max_staleness
    }
    per_s = {factor: o.trained_samples / (o.num_steps * o.step_s) for factor, o in rates.items()}
    synchronous_per_s = base.trained_samples / (base.num_steps * base.step_s)
    return Prediction(
        synchronous=_middle(steps),
        gains={factor: rate / synchronous_per_s for factor, rate in per_s.items()},
        is_scaled=small.num_groups != scenario.num_groups or small.cost != scenario.cost,
    )


def _middle(steps: Sequence[Timeline]) -> Timeline:
    """Return the step of median duration."""
    return sorted(steps, key=lambda timeline: timeline.time_s)[len(steps) // 2]


def _factors(run: RunFiles) -> list[float]:
    """Return the factors to simulate, the run's own among them."""
    own = run.mean("rollout/over_sampling_factor", late=True) or 1.0
    return sorted({*_FACTORS, round(own, 2)} - {1.0})


def _scenario(run: RunFiles, recorded: RecordedRun) -> Scenario:
    """Return the run as a scenario for the simulator."""
    num_workers = int(run.number("runtime.num_workers", 1))
    num_engines = max(1, num_workers // int(run.number("engine.tensor_parallel_size", 1)))
    budget = int(run.number("rollout.max_response_tokens", 1))
    tick_steps = run.setting("rollout.tick_steps")
    if not isinstance(tick_steps, int) or tick_steps < 1:
        tick_steps = auto_tick_steps(num_engines=num_engines, max_response_tokens=budget)
    return Scenario(
        cost=recorded.cost,
        length_of=Recorded(groups=recorded.lengths),
        num_groups=int(run.number("trainer.num_groups", 1)),
        group_size=int(run.number("rollout.group_size", 1)),
        max_response_tokens=budget,
        prompt_tokens=recorded.prompt_tokens,
        num_engines=num_engines,
        tick_steps=tick_steps,
        max_staleness=int(run.number("rollout.max_staleness")),
        finish_stale=run.setting("rollout.on_stale") == "finish",
        keeps_parked=recorded.keeps_parked,
        no_signal_frac=min(recorded.no_signal_frac, 0.99),
        is_filtered=bool(run.setting("algorithm.dynamic_sampling")),
        rest_s=recorded.rest_s,
    )
