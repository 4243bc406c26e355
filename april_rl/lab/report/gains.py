"""Simulated gains of other over-sampling factors with a run's lengths and engine cost."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config.store import ConfigError, run_config
from april_rl.lab.report.recorded_run import recorded_scenario
from april_rl.lab.report.run_files import RunFiles
from april_rl.lab.simulator.outcome import Scale
from april_rl.lab.simulator.prediction import SYNCHRONOUS, Mode, predict
from april_rl.lab.simulator.recorded_lengths import RecordingError
from april_rl.lab.simulator.scaled_down import scale_down
from april_rl.training.rollout.collector import Collection
from april_rl.training.rollout.measures.timeline import Timeline, timeline_of

_FACTORS = (1.5, 2.0, 3.0)
_NUM_STEPS, _WARMUP_STEPS = 6, 4
NUM_FILES = 4  # files to read: the samples of a large model take hundreds of MB a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Simulation of a run: one synchronous step, and the gain of each α over it."""

    synchronous: Timeline
    by_factor: dict[float, float]  # samples/s of a step ÷ those of the synchronous loop
    is_scaled: bool  # it was simulated at a smaller size, with equal times

    @property
    def tail(self) -> tuple[float, float]:
        """Return (w, p) at the bend of the curve, where w − p is largest: the synchronous
        rollout waits for the last share p of its samples for the share w of its time.
        """
        ended = sorted(stay.ended_s for stay in self.synchronous.stays)
        shares = (
            (1 - at_s / self.synchronous.time_s, 1 - number / len(ended))
            for number, at_s in enumerate(ended, start=1)
        )
        return max(shares, key=lambda share: share[0] - share[1])


def simulated_gains(run: RunFiles) -> Gains | None:
    """Simulate the synchronous loop and some values of α; None if the run recorded too little, or
    this version cannot read its settings.
    """
    try:
        config = run_config(run.run_dir / "config.yaml")
        scenario = recorded_scenario(run, config, num_files=NUM_FILES)
    except (ConfigError, RecordingError):
        return None
    small = scale_down(scenario)
    own = round(run.mean("rollout/over_sampling_factor", late=True) or 1.0, 2)
    factors = sorted({*_FACTORS, own} - {1.0})
    allowed = [factor for factor in factors if factor - 1 <= scenario.max_staleness]
    steps: list[Timeline] = []

    def keep(mode: Mode, collection: Collection) -> None:
        if mode == SYNCHRONOUS:
            steps.append(timeline_of(collection.record))

    predictions = list(
        predict(
            small,
            [SYNCHRONOUS, *(Mode(factor, refill=True) for factor in allowed)],
            num_steps=_NUM_STEPS,
            warmup_steps=_WARMUP_STEPS,
            on_step=keep,
        )
    )
    return Gains(
        synchronous=sorted(steps, key=lambda step: step.time_s)[len(steps) // 2],
        by_factor={each.mode.factor: each.step_gain for each in predictions[1:]},
        is_scaled=small.scale != Scale(),
    )
