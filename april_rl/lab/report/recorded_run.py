"""The scenario that a run directory describes: its settings, lengths, rewards and engine cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.choices import Device, Resume
from april_rl.lab.report.run_files import RunFiles
from april_rl.lab.simulator.engine_cost import MIN_TICKS, EngineCost, EngineWork, fit_cost
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.recorded_lengths import RecordingError, read_groups
from april_rl.lab.simulator.scenarios import scenario_of
from april_rl.lab.simulator.simulation import Scenario
from april_rl.training.rollout.measures.timeline import read_timeline
from april_rl.training.rollout.ticks import TickWork

# For runs with refill at α > 1: their batches have nearly equal sizes, which does not show what a
# small batch costs (docs/usage.md).
NO_SMALL_BATCHES = (
    "What small batches cost is a guess there, because this run had none; python -m april_rl "
    "compare measures the gain over a synchronous run."
)


def recorded_scenario(
    run: RunFiles, config: TrainConfig, *, num_files: int | None = None
) -> Scenario:
    """Return a run, which had this configuration, as a scenario: its lengths, rewards and engine
    cost.

    All come from its later half, where caches are warm and the policy writes its later lengths;
    lengths and cost at most from its last `num_files` files of samples and timelines. Raise
    RecordingError if no samples or timelines were saved.
    """
    scenario = scenario_of(
        config,
        num_engines=int(config.runtime.num_workers) // config.engine.tensor_parallel_size,
        length_of=Recorded(groups=_lengths(run.run_dir, num_files=num_files), seed=config.seed),
        cost=_with_controller(read_cost(run.run_dir, num_files=num_files), run),
        keeps_parked=_keeps_parked(run, config),
        prompt_tokens=run.mean("rollout/prompt_tokens_mean", late=True) or 0.0,
        no_signal_frac=run.mean("reward/no_signal_frac") or 0.0,
    )
    step_s, rollout_s = (run.mean(key, late=True) for key in ("time/step_s", "rollout/time_s"))
    return replace(scenario, rest_s=max(0.0, (step_s or 0.0) - (rollout_s or 0.0)))


def read_cost(run_dir: Path, *, num_files: int | None = None) -> EngineCost:
    """Return the engine's cost, fitted to the ticks in the later half of a run's timelines, or in
    the last `num_files` of that half; earlier files are read too if there are too few ticks. The
    fit ignores ticks that the machine held up, and is then scaled to the time of all ticks.

    Raise RecordingError if there are no timelines, or if they hold too few ticks.
    """
    folder = run_dir / "timeline"
    paths = sorted(folder.glob("step_*[0-9].json"), reverse=True)
    if not paths:
        raise RecordingError(
            f"{folder} holds no timeline of a step: run with tracking.save_samples_every=1"
        )
    half = (len(paths) + 1) // 2
    ticks: list[TickWork] = []
    try:
        for number, path in enumerate(paths):
            if number >= min(half, num_files or half) and len(ticks) >= MIN_TICKS:
                break
            ticks += read_timeline(path).ticks
        cost = fit_cost(ticks)
    except ValueError as error:
        raise RecordingError(
            f"{folder} does not show what an engine step costs: {error}. Train more steps with "
            "tracking.save_samples_every=1"
        ) from error
    fitted_s = sum(cost.seconds(EngineWork(*tick[:-1])) for tick in ticks)
    return _times(cost, sum(tick.elapsed_s for tick in ticks if tick.engine_steps) / fitted_s)


def _keeps_parked(run: RunFiles, config: TrainConfig) -> bool:
    """Return whether caches were kept; if no sample was parked, whether they would have been."""
    if run.total("rollout/resumed_samples"):
        return run.total("rollout/kept_samples") > 0
    resume = config.rollout.resume  # auto keeps on a CPU, and on a GPU if the memory plan allows it
    is_auto_on_cpu = resume is Resume.auto and config.runtime.device is Device.cpu
    return resume is Resume.keep or is_auto_on_cpu


def _with_controller(cost: EngineCost, run: RunFiles) -> EngineCost:
    """Return the cost with the time in which an engine waits for the controller."""
    keys = ("rollout/engine_s", "rollout/controller_s", "rollout/time_s")
    engine_s, controller_s, time_s = (run.mean(key, late=True) or 0.0 for key in keys)
    return _times(cost, min(engine_s + controller_s, time_s) / engine_s if engine_s else 1.0)


def _times(cost: EngineCost, factor: float) -> EngineCost:
    return EngineCost(*(factor * each for each in cost))


def _lengths(run_dir: Path, *, num_files: int | None) -> tuple[tuple[int, ...], ...]:
    paths = sorted((run_dir / "samples").glob("step_*.jsonl"))
    half = (len(paths) + 1) // 2
    groups = read_groups(paths[-min(half, num_files or half) :], int)  # int refuses a text
    if not groups:
        raise RecordingError(
            f"{run_dir}/samples holds no samples of a step: run with tracking.save_samples_every=1"
        )
    return groups
