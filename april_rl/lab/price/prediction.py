"""Seconds of a step under several schedules, simulated with the production collector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.price.memory import RealMemory
from april_rl.lab.price.step_cost import TrainedTokens, rest_s, update_s
from april_rl.lab.simulator.gpu_kinds import EAGER_LAYER_S, Rates
from april_rl.lab.simulator.length_distributions import LengthDistribution, sample_lengths
from april_rl.lab.simulator.model_cost import ModelCost, Shape
from april_rl.lab.simulator.outcome import Outcome
from april_rl.lab.simulator.prediction import SYNCHRONOUS, Mode, predict
from april_rl.lab.simulator.scaled_down import scale_down
from april_rl.lab.simulator.scenarios import scenario_of
from april_rl.lab.simulator.simulation import Scenario
from april_rl.lab.simulator.turns import Turns
from april_rl.training.learner.model.sizes import ModelSizes

_FACTORS = (1.0, 1.5, 2.0)
_NO_SIGNAL_FRAC = 0.4  # share of the groups, under dynamic sampling
_STEPS, _WARMUP_STEPS, _TICKS_PER_RESPONSE = 4, 3, 64


class Work(NamedTuple):
    """The model, prompts and responses of a step."""

    shape: Shape
    critic: ModelSizes | None
    length_of: LengthDistribution
    prompt_tokens: float
    no_signal_frac: float  # share of the groups, which dynamic sampling rejects
    score_s: float  # from the end of a sample to its reward
    turns: Turns | None


def work_of(
    config: TrainConfig, assumed: Assumptions, *, shape: Shape, critic: ModelSizes | None = None
) -> Work:
    """Return what a step of these settings is made of, under the assumptions."""
    return Work(
        shape=shape,
        critic=critic,
        length_of=assumed.length_of(config),
        prompt_tokens=assumed.tokens_of_prompt(config),
        no_signal_frac=_NO_SIGNAL_FRAC if config.algorithm.dynamic_sampling else 0.0,
        score_s=assumed.score_s,
        turns=assumed.turns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """A mean step under one schedule, in seconds."""

    mode: Mode
    outcome: Outcome
    rollout_s: float
    update_s: float
    rest_s: float  # weight sync, offloads, sleep, controller

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.update_s + self.rest_s

    @property
    def name(self) -> str:
        factor = f"α = {self.mode.factor:g}"
        return factor if self.mode.refill else f"{self.mode.name}, {factor}"

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        schedule = {"mode": self.mode.name, "refill": self.mode.refill}
        parts = {"rollout_s": self.rollout_s, "update_s": self.update_s, "rest_s": self.rest_s}
        return {**schedule, **self.outcome.figures(), **parts, "step_s": self.step_s}


def own_mode(config: TrainConfig) -> Mode:
    """Return the schedule of the settings."""
    return Mode(config.rollout.over_sampling_factor, refill=config.rollout.refill)


def modes_beside(config: TrainConfig) -> list[Mode]:
    """Return the synchronous loop, refill at several α, and the schedule of the settings."""
    cap = config.rollout.max_staleness
    refills = [Mode(factor, refill=True) for factor in _FACTORS if factor - 1 <= cap]
    modes = sorted({*refills, own_mode(config)} - {SYNCHRONOUS}, key=lambda mode: mode.factor)
    return [SYNCHRONOUS, *modes]


def step_prices(
    memory: RealMemory, work: Work, *, rates: Rates, modes: Iterable[Mode]
) -> list[StepPrice]:
    """Return the price of a step under each mode; all get the same prompts and lengths."""
    config = memory.config
    trained = TrainedTokens.of(
        sample_lengths(work.length_of, cap=config.rollout.max_response_tokens),
        prompt_tokens=work.prompt_tokens + (work.turns.observed_tokens if work.turns else 0),
        num_samples=config.trainer.num_groups * config.rollout.group_size,
    )
    learning_s = update_s(work.shape, trained, memory, rates=rates, critic=work.critic)
    small = scale_down(scenario_at_real_size(memory, work, rates))
    return [
        StepPrice(
            mode=found.mode,
            outcome=found.outcome,
            rollout_s=found.outcome.rollout_s / found.outcome.num_steps,
            update_s=learning_s,
            rest_s=rest_s(work.shape, memory, rates),
        )
        for found in predict(small, modes, num_steps=_STEPS, warmup_steps=_WARMUP_STEPS)
    ]


def evaluation_s(memory: RealMemory, work: Work, rates: Rates, *, num_responses: int) -> float:
    """Return the seconds of an evaluation, with responses as long as in training."""
    if not num_responses:
        return 0.0
    real = scenario_at_real_size(memory, work, rates)
    asked = replace(real, num_groups=num_responses, group_size=1, is_filtered=False)
    [found] = predict(scale_down(asked), [SYNCHRONOUS], num_steps=1, warmup_steps=0)
    return found.outcome.rollout_s


def scenario_at_real_size(memory: RealMemory, work: Work, rates: Rates) -> Scenario:
    """Return the run on its GPUs as a scenario to simulate."""
    config, layout = memory.config, memory.layout
    if rates.layer_s and not config.engine.cuda_graphs:  # a calibration has none
        rates = replace(rates, layer_s=EAGER_LAYER_S)
    scenario = scenario_of(
        config,
        num_engines=layout.num_engines,
        cost=ModelCost(
            shape=work.shape,
            rates=rates,
            num_gpus=layout.tensor_parallel_size,
            weight_bytes=memory.inputs.engine_bytes,
            kv_bytes=memory.inputs.kv_bytes,
        ),
        length_of=work.length_of,
        keeps_parked=config.rollout.resume.keeps_caches,
        prompt_tokens=work.prompt_tokens,
        no_signal_frac=work.no_signal_frac,
    )
    num_turns = work.turns.num_turns if work.turns else 1  # the next begins after a tick
    ticks = config.rollout.max_response_tokens // _TICKS_PER_RESPONSE // num_turns
    return replace(scenario, tick_steps=max(8, ticks), score_s=work.score_s, turns=work.turns)
