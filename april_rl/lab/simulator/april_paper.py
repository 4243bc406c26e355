"""The table of the APRIL paper (arXiv 2509.18521), run again on the simulator.

Set-up of the paper: 8 GPUs, 32 prompts x 8 samples, α = 2, responses of at most 16,384 tokens,
rollout throughput over the synchronous loop. It gives neither lengths nor hardware in a form that
could be entered here, so the distributions below are assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from april_rl.lab.simulator.length_distributions import Lognormal, median_for
from april_rl.lab.simulator.prediction import SYNCHRONOUS, Mode, Prediction, predict
from april_rl.lab.simulator.presets import PRESETS
from april_rl.lab.simulator.simulation import Scenario

MAX_RESPONSE_TOKENS = 16384
NO_SIGNAL_FRAC = 0.4  # share of groups that the filter rejects
_SIGMA = 0.6
_CORRELATION = 0.3  # correlation between samples of one group
_NUM_STEPS, _WARMUP_STEPS = 8, 5
# Most of the simulator's time goes into ticks. A tick of this many steps is 2 % of a synchronous
# step.
_TICK_STEPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCase:
    """One cell of the table, with the length distribution it is simulated with."""

    data_set: str
    # Mean length of responses within the budget; it is longer for harder data sets.
    mean_tokens: float
    model: str
    is_filtered: bool
    paper_gain: float  # over the synchronous loop
    num_engines: int = 8  # each with four of the prompts

    def scenario(self) -> Scenario:
        """Return the set-up of the paper."""
        preset = PRESETS[f"h100_{self.model}"]
        median = median_for(self.mean_tokens, sigma=_SIGMA, cap=MAX_RESPONSE_TOKENS)
        return Scenario(
            cost=preset.cost,
            length_of=Lognormal(median_tokens=median, sigma=_SIGMA, correlation=_CORRELATION),
            num_groups=4 * self.num_engines,
            num_engines=self.num_engines,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            tick_steps=_TICK_STEPS,
            no_signal_frac=NO_SIGNAL_FRAC if self.is_filtered else 0.0,
            is_filtered=self.is_filtered,
        )


def paper_cases() -> Iterator[PaperCase]:
    """Yield the twelve cells: by data set, 4B before 8B, GRPO before the filter."""
    for data_set, mean_tokens, gains in (
        ("DAPO-Math-17k", 10_500.0, (0.24, 0.08, 0.26, 0.08)),
        ("DeepScaleR", 10_000.0, (0.31, 0.11, 0.35, 0.08)),
        ("DeepMath-103K", 9_500.0, (0.35, 0.10, 0.44, 0.10)),
    ):
        cells = ((model, is_filtered) for model in _MODELS for is_filtered in (False, True))
        for gain, (model, is_filtered) in zip(gains, cells, strict=True):
            yield PaperCase(
                data_set=data_set,
                mean_tokens=mean_tokens,
                model=model,
                is_filtered=is_filtered,
                paper_gain=1 + gain,
            )


_MODELS = ("qwen3_4b", "qwen3_8b")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """A simulated cell next to the paper's figure; gains are over the synchronous loop."""

    case: PaperCase
    synchronous: Prediction
    one_shot: Prediction  # α = 2 without refill: the paper's scheme
    refill: Prediction  # α = 2 with refill: ours
    kept: Prediction  # like `refill`, and parked samples keep their KV cache

    def figures(self) -> dict[str, object]:
        """Return the case and the simulated gains by name."""
        return {
            **asdict(self.case),
            "one_shot_gain": self.one_shot.gain,
            "refill_gain": self.refill.gain,
            "refill_kept_gain": self.kept.gain,
            "synchronous_step_s": self.synchronous.outcome.step_s,
        }


def simulate_case(case: PaperCase) -> PaperRow:
    """Simulate a cell with the synchronous loop, the paper's scheme and ours."""
    scenario, refill = case.scenario(), Mode(2.0, refill=True)
    modes = [SYNCHRONOUS, Mode(2.0, refill=False), refill]
    synchronous, one_shot, refilled = _predict(scenario, modes)
    # Without over-sampling nothing is parked, which is the synchronous loop.
    _, kept = _predict(replace(scenario, keeps_parked=True), [SYNCHRONOUS, refill])
    return PaperRow(
        case=case, synchronous=synchronous, one_shot=one_shot, refill=refilled, kept=kept
    )


def _predict(scenario: Scenario, modes: list[Mode]) -> Iterator[Prediction]:
    return predict(scenario, modes, num_steps=_NUM_STEPS, warmup_steps=_WARMUP_STEPS)
