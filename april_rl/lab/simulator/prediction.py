"""Predict the gain of an over-sampling factor: simulate one scenario in several modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from april_rl.lab.simulator.outcome import Outcome
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.training.rollout.collector import Collection


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of the rollout: its α, and whether a free slot is filled at once."""

    factor: float
    refill: bool

    @property
    def name(self) -> str:
        if self.refill:
            return "refill"
        return "synchronous" if self.factor == 1 else "one-shot"


SYNCHRONOUS = Mode(1.0, refill=False)


def modes_of(factors: Iterable[float], *, refill: bool) -> list[Mode]:
    """Return the synchronous loop and then every other mode with these factors, rising."""
    chosen = [Mode(factor, refill=refill) for factor in sorted(set(factors))]
    return [SYNCHRONOUS, *(mode for mode in chosen if mode != SYNCHRONOUS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated mode, and its gain over the mode that it is compared with."""

    mode: Mode
    outcome: Outcome
    gain: float  # ratio of trained samples per second of rollout
    step_gain: float  # the same ratio for whole steps

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        gains = {"gain": self.gain, "step_gain": self.step_gain}
        return {"mode": self.mode.name, **self.outcome.figures(), **gains}


def predict(
    scenario: Scenario,
    modes: Iterable[Mode],
    *,
    num_steps: int,
    warmup_steps: int,
    on_step: Callable[[Mode, Collection], None] = lambda mode, collection: None,  # noqa: ARG005
) -> Iterator[Prediction]:
    """Yield the prediction for each mode; all modes get the same prompts, lengths and rewards.
    `on_step` is called with every step of every mode.
    """
    base: Outcome | None = None
    for mode in modes:
        outcome = simulate(
            scenario,
            over_sampling_factor=mode.factor,
            refill=mode.refill,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            on_step=lambda _, collection, mode=mode: on_step(mode, collection),  # type: ignore[misc]
        )
        base = base or outcome
        yield Prediction(
            mode=mode,
            outcome=outcome,
            gain=outcome.trained_samples_per_s / base.trained_samples_per_s,
            step_gain=base.step_s / outcome.step_s,
        )


def comparison_table(predictions: Sequence[Prediction], *, title: str) -> Table:
    """Return a table with a row for every over-sampling factor. Memory is that of the engine
    that held most.
    """
    table = Table(title=title)
    heads = ("α", "step s", "samples/s", "gain", "occupied", "off-policy", "age mean", "max")
    for head in ("mode", *heads, "re-prefill", "peak KV"):
        table.add_column(head, justify="left" if head == "mode" else "right", no_wrap=True)
    for each in predictions:
        outcome = each.outcome
        table.add_row(
            each.mode.name,
            f"{outcome.factor:g}",
            f"{outcome.step_s:.3g}",
            f"{outcome.trained_samples_per_s:.3g}",
            f"{each.gain:.2f}",
            f"{outcome.occupancy:.2f}",
            f"{outcome.off_policy_token_frac:.2f}",
            f"{outcome.age_mean:.2f}",
            f"{outcome.age_max}",
            f"{outcome.reprefill_per_generated_token:.2f}",
            f"{outcome.peak_kv_tokens:,} tokens",
        )
    return table
