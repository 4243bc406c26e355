"""The plan of a run on some GPUs: what fits, and what each schedule takes and costs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from april_rl.config import TrainConfig
from april_rl.config.choices import Device
from april_rl.errors import LayoutError
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.price.gpus import Gpus
from april_rl.lab.price.memory import RealMemory, real_memory
from april_rl.lab.price.prediction import (
    StepPrice,
    Work,
    evaluation_s,
    modes_beside,
    own_mode,
    step_prices,
)
from april_rl.lab.simulator.gpu_kinds import EXPECTED, FAST, SLOW
from april_rl.lab.simulator.length_distributions import mean_of
from april_rl.start.planning.facts import Models

_TOO_FULL = (
    "  * needs more than the KV cache: vLLM would preempt samples and compute them again, so it "
    "would take longer than that"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """One choice of GPUs for a run."""

    gpus: Gpus
    config: TrainConfig  # as asked
    memory: RealMemory | None  # None: the workers do not form whole engines
    refusal: str = ""  # why the run cannot start there
    response_tokens: float = 0.0  # mean
    prices: Sequence[StepPrice] = ()
    bounds: tuple[float, float] = (0.0, 0.0)  # seconds of a step of the settings, fast and slow
    evaluation_s: float = 0.0  # of an evaluation of all sets

    @property
    def own(self) -> StepPrice:
        return next(price for price in self.prices if price.mode == own_mode(self.config))

    def hours(self, step_s: float) -> float:
        """Return the hours of all steps and evaluations."""
        evaluations_s = num_evaluations(self.config) * self.evaluation_s
        return (self.config.trainer.num_steps * step_s + evaluations_s) / 3600

    def money(self, step_s: float) -> float | None:
        """Return the price of all hours; None without one of a GPU."""
        price = self.gpus.price
        return None if price is None else self.hours(step_s) * self.gpus.count * price

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        found: dict[str, object] = {"gpu": self.gpus.kind.title, "num_gpus": self.gpus.count}
        found["mean_response_tokens"] = self.response_tokens
        if self.refusal:
            return {**found, "refused": self.refusal}
        schedules = [
            {
                **price.figures(),
                "hours": self.hours(price.step_s),
                "money": self.money(price.step_s),
            }
            for price in self.prices
        ]
        between = [self.hours(step_s) for step_s in self.bounds]
        found |= {"evaluation_s": self.evaluation_s, "hours_between": between}
        return {**found, "schedules": schedules}


def num_evaluations(config: TrainConfig) -> int:
    """Return how often a run evaluates, before the first step and after the last one, too."""
    return 1 + ceil(config.trainer.num_steps / config.evaluation.every)


def plan_on(
    gpus: Gpus, config: TrainConfig, *, models: Models, work: Work, assumed: Assumptions
) -> GpuPlan:
    """Plan the run on these GPUs, and price its steps if it fits there."""
    measured, kind = assumed.calibration, gpus.kind
    runtime = replace(config.runtime, num_workers=gpus.count, device=Device.gpu)
    try:
        memory = real_memory(
            replace(config, runtime=runtime), models, gpu_gib=kind.gib, measured=measured
        )
    except LayoutError as error:
        return GpuPlan(gpus=gpus, config=config, memory=None, refusal=str(error))
    if memory.too_large:
        return GpuPlan(gpus=gpus, config=config, memory=memory, refusal=memory.too_large)
    rates = measured.rates(kind) if measured else kind.rates(EXPECTED)
    around = (rates, rates) if measured else (kind.rates(FAST), kind.rates(SLOW))
    fast, slow = (
        step_prices(memory, work, rates=found, modes=[own_mode(config)])[0] for found in around
    )
    return GpuPlan(
        gpus=gpus,
        config=config,
        memory=memory,
        response_tokens=mean_of(work.length_of, cap=config.rollout.max_response_tokens),
        prices=step_prices(memory, work, rates=rates, modes=modes_beside(config)),
        bounds=(fast.step_s, slow.step_s),
        evaluation_s=evaluation_s(
            memory, work, rates, num_responses=assumed.evaluated_responses(config)
        ),
    )


def plan_text(plan: GpuPlan) -> str:
    """Return the plan as lines for the terminal."""
    head = f"{plan.gpus.name}, {plan.gpus.kind.gib:g} GiB"
    if plan.memory is None or plan.refusal:
        first, *rest = plan.refusal.splitlines()
        return "\n".join([f"{head}: {first}", *(f"  {line.strip()}" for line in rest)])
    low, high = (plan.hours(step_s) for step_s in plan.bounds)
    money = " to ".join(in_dollars(found) for s in plan.bounds if (found := plan.money(s)))
    cost = f", {money}" if money else ""
    steps = f"{plan.config.trainer.num_steps:,} steps"
    if plan.evaluation_s:
        steps += f" and {num_evaluations(plan.config)} evaluations of {plan.evaluation_s:.3g} s"
    return "\n".join(
        [
            f"{head}: fits; the KV cache of an engine holds {plan.memory.kv_tokens:,} tokens",
            f"  {_decisions(plan.memory.config)}",
            step_table(plan.memory, plan.prices, plan=plan),
            f"  * {steps}: {low:.3g} to {high:.3g} hours{cost}, if programs reach more or less",
            *([_TOO_FULL] if plan.own.outcome.peak_kv_tokens > plan.memory.kv_tokens else []),
        ]
    )


def _decisions(config: TrainConfig) -> str:
    """Return the settings that the memory plan decides."""
    engine, learner = config.engine, config.learner
    return (
        f"engine.gpu_memory_utilization={engine.gpu_memory_utilization:g} "
        f"engine.sleep={engine.sleep.value} rollout.resume={config.rollout.resume.value} "
        f"learner.activation_checkpointing={learner.recomputed_share:.3g}"
    )


def step_table(
    memory: RealMemory, prices: Sequence[StepPrice], *, plan: GpuPlan | None = None
) -> str:
    """Return a row for each schedule, `*` before that of the settings: seconds of a step by part,
    its gain over the synchronous loop, ages and KV cache; with `plan` also hours and money.
    """
    heads = ["rollout", "update", "rest", "step, s", "gain", "off-policy", "age max", "KV cache"]
    if plan is not None:
        heads += ["hours", "money"] if plan.gpus.price else ["hours"]
    lines = [f"  {'':<20}{''.join(f'{head:>11}' for head in heads)}"]
    for price in prices:
        outcome, step_s = price.outcome, price.step_s
        cells = [f"{part:.1f}" for part in (price.rollout_s, price.update_s, price.rest_s, step_s)]
        cells.append(f"{prices[0].step_s / step_s:.2f}")
        cells += [f"{outcome.off_policy_token_frac:.0%}", f"{outcome.age_max}"]
        cells.append(f"{outcome.peak_kv_tokens / max(1, memory.kv_tokens):.0%}")
        if plan is not None:
            cells.append(f"{plan.hours(step_s):.3g}")
            money = plan.money(step_s)
            cells += [] if money is None else [in_dollars(money)]
        mark = "*" if price.mode == own_mode(memory.config) else " "
        lines.append(f"{mark} {price.name:<20}{''.join(f'{cell:>11}' for cell in cells)}")
    return "\n".join(lines)


def in_dollars(money: float) -> str:
    """Return an amount, with cents if it is small."""
    return f"${money:,.0f}" if money >= 100 else f"${money:,.2f}"
