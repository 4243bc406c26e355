"""The question of `auto`: simulate the current run with several over-sampling factors."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.lab.simulator.prediction import Mode, Prediction, predict
from april_rl.lab.simulator.scaled_down import scale_down
from april_rl.lab.simulator.simulation import Scenario

# Steps that fill the buffer; then the smallest number of counted steps, and of samples in them.
_WARMUP_STEPS, _FEWEST_STEPS, _FEWEST_SAMPLES = 8, 16, 1280


@dataclass(frozen=True, slots=True)
class Comparison:
    """Modes to compare on the same work."""

    scenario: Scenario  # its lengths come from the run
    modes: tuple[Mode, ...]

    def predictions(self) -> list[Prediction]:
        """Return the prediction for each mode, by short simulations."""
        small = scale_down(self.scenario)
        num_steps = max(_FEWEST_STEPS, _FEWEST_SAMPLES // (small.num_groups * small.group_size))
        return list(predict(small, self.modes, num_steps=num_steps, warmup_steps=_WARMUP_STEPS))
