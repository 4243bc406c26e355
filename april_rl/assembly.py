"""From a checked configuration to the parts of a run: every value is taken out here, once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from april_rl.algorithm.advantages import BatchAdvantages
from april_rl.batch.packing import Packer
from april_rl.config import TrainConfig
from april_rl.config.choices import ComputeDtype, Kl, Resume
from april_rl.config.notes import inert_settings
from april_rl.config.prompt_sets import evaluation_set, training_sets
from april_rl.config.task import PromptSetConfig
from april_rl.data.prompts import PromptTable, load_prompts
from april_rl.data.stream import PromptStream
from april_rl.data.tokenizer import Tokenizer, load_tokenizer
from april_rl.errors import RunError
from april_rl.evaluation.evaluator import Evaluator
from april_rl.learning import (
    ADVANTAGES,
    build_packer,
    learner_settings,
    lora_settings,
    objective_settings,
)
from april_rl.rewards.check import check_reward
from april_rl.rewards.pool import RewardPool
from april_rl.rollout.collector import Collector
from april_rl.runtime.cluster import stop_ray
from april_rl.runtime.engines import RayEngines
from april_rl.runtime.kv_room import KvRoom, kv_demand, planned_kv_tokens
from april_rl.runtime.layout import Layout, settled
from april_rl.runtime.memory_check import check_memory, memory_settings
from april_rl.runtime.preflight import ModelFacts, check_start
from april_rl.runtime.settings import EngineSettings, WorkerSettings, engine_options
from april_rl.runtime.watchdog import Watchdog
from april_rl.runtime.workers import Workers
from april_rl.scheduling import build_collector, num_slots, tick_steps
from april_rl.tracking.tracker import Tracker
from april_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the trainer drives."""

    tracker: Tracker
    tokenizer: Tokenizer
    rewards: RewardPool
    workers: Workers
    engines: RayEngines
    collector: Collector
    packer: Packer
    evaluator: Evaluator
    held_out: dict[str, PromptTable]
    advantages: BatchAdvantages


def assemble(
    config: TrainConfig, *, run_dir: Path, plain: Mapping[str, object], stack: ExitStack
) -> Parts:
    """Everything a run needs, started; `stack` gets what ends it.

    Checks come before what they spare: machine, model, data, reward, and only then
    processes. Raises RunError with one message.
    """
    stack.callback(stop_ray)
    config, layout = settled(config)
    facts = _check_machine(config, layout)
    packer = build_packer(config, num_ranks=layout.num_workers, hidden_size=facts.hidden_size)
    tracker = stack.enter_context(_tracker(config, run_dir, layout.shown_in(plain)))
    tracker.message(str(layout))
    for line in inert_settings(config, device=layout.device):
        tracker.message(line)
    tokenizer = load_tokenizer(config.model.path)
    with tracker.phase("reading the data"):
        load = partial(_load, config, tokenizer, tracker)
        prompts = load(key="data.path", chosen=training_sets(config.data)[""])
        held_out = {
            name: load(
                key=f"evaluation.sets.{name}.path", chosen=evaluation_set(config.data, chosen)
            )[: config.evaluation.max_prompts or None]
            for name, chosen in config.evaluation.sets.items()
        }
    with tracker.phase("trying the reward"):
        rewards = _rewards(config, prompts[0], tokenizer)
    stack.callback(rewards.close)
    workers = _workers(config, layout, run_dir)
    stack.callback(workers.close)
    settings, memory = memory_settings(config, layout), workers.memory()
    tracker.message(str(check_memory(facts, settings, memory)))
    kv_room = KvRoom(kv_demand(config, layout), tell=tracker.message)
    least = min(worker.device_bytes for worker in memory)
    kv_room.compare(planned_kv_tokens(facts, settings, device_bytes=least))
    _start(workers, tracker)
    kv_cache_tokens = workers.kv_cache_tokens()
    kv_room.compare(kv_cache_tokens // layout.num_engines)
    engines = RayEngines(workers, deterministic=config.deterministic)
    stream = PromptStream(prompts, seed=config.seed)
    return Parts(
        tracker=tracker,
        tokenizer=tokenizer,
        rewards=rewards,
        workers=workers,
        engines=engines,
        collector=build_collector(
            config,
            engines,
            rewards,
            prompts=stream,
            kv_cache_tokens=kv_cache_tokens,
        ),
        packer=packer,
        evaluator=_evaluator(config, engines, rewards),
        held_out=held_out,
        advantages=ADVANTAGES[config.algorithm.advantage],
    )


def _check_machine(config: TrainConfig, layout: Layout) -> ModelFacts:
    window_tokens, window_key = _window(config)
    return check_start(
        model_path=config.model.path,
        device=layout.device,
        num_workers=layout.num_workers,
        is_cluster=config.runtime.ray_address is not None,
        tensor_parallel_size=layout.tensor_parallel_size,
        window_tokens=window_tokens,
        window_key=window_key,
        learner_bytes=_learner_bytes(config),
    )


def _learner_bytes(config: TrainConfig) -> int:
    """Bytes the learner holds of a parameter: float32 master, gradient and two Adam moments, and
    the frozen reference; under adapters, which are small, the frozen weight alone.
    """
    frozen = 4 if config.learner.compute_dtype is ComputeDtype.float32 else 2
    if config.lora.rank:
        return frozen
    return 16 if config.algorithm.kl is Kl.none else 16 + frozen


def _rewards(config: TrainConfig, example: Prompt, tokenizer: Tokenizer) -> RewardPool:
    """The pool, after one call of the function on a prompt of the data."""
    decode = tokenizer.decoder()
    check_reward(config.reward, decode=decode, prompt=example.text, answer=example.answer)
    return RewardPool(config.reward, decode=decode)


def _load(
    config: TrainConfig,
    tokenizer: Tokenizer,
    tracker: Tracker,
    *,
    key: str,
    chosen: PromptSetConfig,
) -> PromptTable:
    """Return the prompts of the set that the setting `key` names, and say how many there are."""
    table = load_prompts(
        chosen,
        tokenizer,
        key=key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.seed,
    )
    tracker.message(table.summary)
    return table


def _window(config: TrainConfig) -> tuple[int, str]:
    """Tokens a sample may have, and the setting that says so."""
    if config.engine.max_model_len:
        return config.engine.max_model_len, "engine.max_model_len"
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return longest, "data.max_prompt_tokens + rollout.max_response_tokens"


def _tracker(config: TrainConfig, run_dir: Path, plain: Mapping[str, object]) -> Tracker:
    return Tracker(
        run_dir=run_dir,
        name=config.name,
        config=plain,
        num_steps=config.trainer.num_steps,
        num_groups=config.trainer.num_groups,
        wandb_mode=config.tracking.wandb.value,
        wandb_project=config.tracking.wandb_project,
        print_samples_every=config.tracking.print_samples_every,
        save_samples_every=config.tracking.save_samples_every,
    )


def _start(workers: Workers, tracker: Tracker) -> None:
    """Show each stage of the workers' start as a phase of its own."""
    with ExitStack() as shown:

        def on_stage(stage: str) -> None:
            shown.close()
            shown.enter_context(tracker.phase(stage))

        num_parameters, num_trained = workers.start(on_stage)
    adapters = "" if num_trained == num_parameters else f", {num_trained / 1e6:.3g} million trained"
    tracker.message(f"policy: {num_parameters / 1e6:.1f} million parameters{adapters}")


def _workers(config: TrainConfig, layout: Layout, run_dir: Path) -> Workers:
    """Under a watchdog whose report goes to the run directory."""
    watchdog = Watchdog(
        report=run_dir.resolve() / "stall_report.txt",
        stall_timeout_s=config.runtime.stall_timeout_s,
        call_timeout_s=config.runtime.call_timeout_s,
    )
    return Workers(
        layout,
        settings=_worker_settings(config, layout),
        address=config.runtime.ray_address,
        watchdog=watchdog,
    )


def _worker_settings(config: TrainConfig, layout: Layout) -> WorkerSettings:
    threads = config.runtime.threads or max(1, (os.cpu_count() or 1) // layout.num_workers)
    return WorkerSettings(
        device=layout.device,
        threads=threads if layout.device == "cpu" else 0,
        learner=learner_settings(config),
        objective=objective_settings(config),
        lora=lora_settings(config),
        engine=_engine_settings(config, layout),
        options=engine_options(config),
    )


def _engine_settings(config: TrainConfig, layout: Layout) -> EngineSettings:
    engine = config.engine
    slots = math.ceil(num_slots(config) / layout.num_engines)
    if 0 < engine.max_num_seqs < slots:
        raise RunError(
            f"engine.max_num_seqs={engine.max_num_seqs} is less than the {slots} samples that "
            "rollout.over_sampling_factor · trainer.num_groups · rollout.group_size puts in flight "
            "on each engine: give 0, or lower one of these"
        )
    return EngineSettings(
        model_path=config.model.path,
        seed=config.seed,
        dtype=engine.dtype.name,
        max_model_len=_window(config)[0],
        max_num_seqs=engine.max_num_seqs or slots,
        max_batched_tokens=engine.max_batched_tokens,
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=not engine.cuda_graphs,
        temperature=config.rollout.temperature,
        keep_parked=config.rollout.resume is Resume.keep,
        tensor_parallel_size=layout.tensor_parallel_size,
    )


def _evaluator(config: TrainConfig, engines: RayEngines, rewards: RewardPool) -> Evaluator:
    return Evaluator(
        engines,
        rewards,
        num_samples=config.evaluation.num_samples,
        max_response_tokens=config.rollout.max_response_tokens,
        num_slots=num_slots(config),
        tick_steps=tick_steps(config, num_engines=engines.num_engines),
        tick_timeout_s=config.runtime.stall_timeout_s,
        seed=config.seed,
    )
