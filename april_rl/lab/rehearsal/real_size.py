"""The recipe at its real size: memory on the GPUs that it names, and what α would gain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from april_rl.config import TrainConfig
from april_rl.config.choices import Device, Sleep
from april_rl.errors import PreflightError
from april_rl.lab.rehearsal.assumptions import Assumptions
from april_rl.lab.rehearsal.findings import SIGMA, Finding
from april_rl.lab.simulator.calibration import Calibration
from april_rl.lab.simulator.length_distributions import Lognormal, median_for
from april_rl.lab.simulator.prediction import modes_of, predict
from april_rl.lab.simulator.presets import H100, Preset
from april_rl.lab.simulator.scenarios import scenario_of
from april_rl.lab.simulator.simulation import Scenario
from april_rl.run.supervision.host_memory import host_memory
from april_rl.start.planning.engine_sleep import decide_sleep_and_resume, with_resume
from april_rl.start.planning.kv_room import kv_demand, kv_warning, planned_kv_tokens
from april_rl.start.planning.layout import settle
from april_rl.start.planning.memory_check import Room, check_plan
from april_rl.start.planning.memory_inputs import Beside, MemoryInputs, memory_inputs
from april_rl.start.planning.memory_plan import GIB, plan_memory
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.runtime.layout import Layout

_FREE_FRAC = 0.98  # free share of a GPU when nothing else runs on it
_FACTORS = (1.0, 1.5, 2.0)
_CORRELATION = 0.3  # correlation of the lengths in a group; docs/experiments.md
_NO_SIGNAL_FRAC = 0.4  # share of the groups, under dynamic sampling
_PROMPT_TOKENS = 256  # assumed length of a prompt; at most data.max_prompt_tokens
_STEPS, _WARMUP_STEPS, _TICKS_PER_RESPONSE = 4, 3, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtRealSize:
    """The plan's table for the machine the recipe names, and what does not fit."""

    table: str
    findings: tuple[Finding, ...]


def real_layout(config: TrainConfig) -> tuple[TrainConfig, Layout]:
    """Return the recipe's layout on the machine it names; num_workers=auto counts as one engine."""
    workers = config.runtime.num_workers
    gpus = config.engine.tensor_parallel_size if isinstance(workers, str) else workers
    is_on_gpu = config.runtime.device is Device.gpu
    return settle(config, gpus=gpus if is_on_gpu else 0, where="the recipe's machine")


def memory_at_real_size(
    config: TrainConfig,
    model: ModelSizes,
    assumed: Assumptions,
    *,
    beside: Beside,
) -> MemoryAtRealSize:
    """Plan the memory of a worker; a phase that does not fit is a finding."""
    config, layout = real_layout(config)
    inputs = _inputs(config, layout, beside, assumed)
    room = _room(layout, gpu_gib=assumed.gpu_gib)
    found: list[Finding] = []
    # The table of a refused rollout.resume=keep is that of engines that stay awake, as it needs.
    awake = replace(inputs, engine=replace(inputs.engine, sleep=Sleep.never))
    decided = decide_sleep_and_resume(config, awake, model=model, room=room)
    try:
        decided = decide_sleep_and_resume(config, inputs, model=model, room=room)
        check_plan(model, decided.inputs, room)
    except PreflightError as error:
        found.append(Finding(name="memory", message=str(error)))
    plan = plan_memory(model, decided.inputs, device_bytes=room.device)
    cache = planned_kv_tokens(model, decided.inputs, device_bytes=room.device)
    for warning in kv_warning(kv_demand(config, layout), cache):
        found.append(Finding(name="kv_cache", message=warning.removeprefix("warning: ")))
    table = "\n".join((str(plan), *decided.reasons))
    return MemoryAtRealSize(table=table, findings=tuple(found))


def _inputs(
    config: TrainConfig, layout: Layout, beside: Beside, assumed: Assumptions
) -> MemoryInputs:
    inputs = memory_inputs(config, layout, beside)
    if assumed.calibration is None:
        return inputs
    return replace(inputs, graph_bytes=assumed.calibration.asleep_gib * GIB)


def _room(layout: Layout, *, gpu_gib: float) -> Room:
    if layout.device == "cpu":
        return Room(device=0, free=host_memory().free / layout.num_workers)
    total = gpu_gib * GIB
    return Room(device=total, free=_FREE_FRAC * total)


def gains_table(
    config: TrainConfig, model: ModelSizes, assumed: Assumptions, *, beside: Beside
) -> str:
    """Return a line for the synchronous loop and for each α: gain, ages, KV cache.

    Lengths are lognormal with the expected mean under the budget, an assumption; the gain is of
    trained samples per second of rollout, over the synchronous loop.
    """
    gib = kv_bytes_per_token(model) / GIB
    lines = [
        f"{'':<14}{'gain':>6}{'occupied':>10}{'off-policy':>12}{'age max':>9}{'peak KV, GiB':>14}"
    ]
    for found in predict(
        scenario_at_real_size(config, model, assumed, beside=beside),
        modes_of(_FACTORS, refill=True),
        num_steps=_STEPS,
        warmup_steps=_WARMUP_STEPS,
    ):
        mode, outcome = found.mode, found.outcome
        name = f"α = {mode.factor:g}" if mode.refill else mode.name
        lines.append(
            f"{name:<14}{found.gain:>6.2f}{outcome.occupancy:>10.2f}"
            f"{outcome.off_policy_token_frac:>12.2f}{outcome.age_max:>9}"
            f"{outcome.peak_kv_tokens * gib:>14.1f}"
        )
    if assumed.calibration is not None:
        lines.append(_rest_line(config, model, assumed, assumed.calibration))
    return "\n".join(lines)


def _rest_line(
    config: TrainConfig, model: ModelSizes, assumed: Assumptions, measured: Calibration
) -> str:
    """Return the seconds of update and weight sync that the calibration predicts for a step."""
    config, layout = real_layout(config)
    tokens = assumed.response_tokens(config) + min(_PROMPT_TOKENS, config.data.max_prompt_tokens)
    tokens *= config.trainer.num_groups * config.rollout.group_size
    # A forward pass takes 2 FLOPs per parameter and token, a backward pass 4, or 2 for frozen ones.
    flops = 6 if config.lora.rank is None else 4
    if config.trainer.num_minibatches * config.trainer.num_passes > 1:
        flops += 2  # log-probabilities before the first of several updates
    update_s = flops * model.num_parameters * tokens
    update_s /= measured.update_flops_per_s * layout.num_workers
    sync_s = 2 * model.num_parameters / measured.sync_bytes_per_s
    return f"a step after its rollout: update {update_s:.1f} s, weight sync {sync_s:.1f} s"


def kv_bytes_per_token(model: ModelSizes) -> int:
    """Return the bytes of the keys and values of one token, in 16 bits."""
    return 2 * model.kv_numbers


def scenario_at_real_size(
    config: TrainConfig, model: ModelSizes, assumed: Assumptions, *, beside: Beside
) -> Scenario:
    """Return the recipe as a scenario to simulate, on H100s or on the calibrated GPU."""
    config, layout = real_layout(config)
    inputs = _inputs(config, layout, beside, assumed)
    room = _room(layout, gpu_gib=assumed.gpu_gib)
    config = with_resume(config, inputs, model=model, room=room)
    budget = config.rollout.max_response_tokens
    mean_tokens = min(assumed.response_tokens(config), 0.95 * budget)
    median = median_for(mean_tokens, sigma=SIGMA, cap=budget)
    # A tensor-parallel engine is simulated as one GPU that is as many times faster, so weights and
    # cache are divided by the number of GPUs.
    shrink = layout.tensor_parallel_size
    cost = Preset(
        num_parameters=model.num_parameters / shrink,
        kv_bytes_per_token=kv_bytes_per_token(model) // shrink,
        rates=assumed.calibration.rates if assumed.calibration else H100,
    ).cost
    scenario = scenario_of(
        config,
        num_engines=layout.num_engines,
        cost=cost,
        length_of=Lognormal(median_tokens=median, sigma=SIGMA, correlation=_CORRELATION),
        keeps_parked=config.rollout.resume.keeps_caches,
        prompt_tokens=min(_PROMPT_TOKENS, config.data.max_prompt_tokens),
        no_signal_frac=_NO_SIGNAL_FRAC if config.algorithm.dynamic_sampling else 0.0,
    )
    return replace(scenario, tick_steps=max(8, budget // _TICKS_PER_RESPONSE))
