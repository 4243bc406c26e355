"""Predict a run with other over-sampling factors, by short simulations."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.lab.simulator.scaled_down import scaled_down
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.rollout.over_sampling import FixedFactor

# Steps that fill the buffer; then the least number of counted steps, and of samples in them.
_WARM_UP_STEPS, _FEWEST_STEPS, _FEWEST_SAMPLES = 8, 16, 1280


@dataclass(frozen=True, slots=True)
class Comparison:
    """Over-sampling factors to compare on the same work."""

    scenario: Scenario
    lengths: tuple[tuple[int, ...], ...]  # [groups][G] tokens of each sample
    refill: bool
    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Simulated steady state with one over-sampling factor."""

    factor: float
    tokens_per_s: float  # generated tokens, which are all trained or rejected in the end
    off_policy_frac: float  # share of the trained tokens
    kv_tokens: float  # largest total over all engines


def predict(comparison: Comparison) -> list[Prediction]:
    """Return the prediction for each factor."""
    small = scaled_down(comparison.scenario, comparison.lengths)
    num_samples = small.scenario.num_groups * small.scenario.group_size
    num_steps = max(_FEWEST_STEPS, _FEWEST_SAMPLES // num_samples)
    predictions = []
    for factor in comparison.factors:
        outcome = simulate(
            small.scenario,
            over_sampling=FixedFactor(factor),
            refill=comparison.refill,
            num_steps=num_steps,
            warmup_steps=_WARM_UP_STEPS,
        )
        predictions.append(
            Prediction(
                factor=factor,
                tokens_per_s=outcome.generated_tokens_per_s,
                off_policy_frac=outcome.off_policy_token_frac,
                kv_tokens=small.kv_tokens * outcome.peak_kv_tokens,
            )
        )
    return predictions
