"""The parts of a worker, built from the configuration: a rank of the learner and of an engine.

Each library is imported where it is needed: a worker that only evaluates loads no learner, and a
learner by itself needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage, RouterReplay
from april_rl.config.engine import EngineConfig
from april_rl.training.rollout.garbage_collection import imports_frozen
from april_rl.training.runtime.weight_sync import sends_adapter

if TYPE_CHECKING:
    from april_rl.training.engine.vllm_engine import VllmEngine
    from april_rl.training.learner.learner import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The run's configuration, and what follows from it and the machine."""

    config: TrainConfig
    device: str  # cpu or cuda (ROCm's torch calls its devices cuda too)
    threads: int  # torch's threads on CPU
    max_model_len: int  # longest prompt with its response in the engine
    max_num_seqs: int  # requests that the engine computes together
    stop_tokens: tuple[int, ...]  # tokens that end a turn


def build_learner(
    config: TrainConfig, *, device: str, on_forward: Callable[[], None] | None = None
) -> Learner:
    """Load this rank's shard; a collective. `on_forward` is called after each forward pass."""
    with imports_frozen():
        from april_rl.training.learner.learner import Learner
        from april_rl.training.learner.objective import Objective
        from april_rl.training.learner.own_loss import load_loss

    return Learner(
        config.learner,
        optimizer=config.optimizer,
        lora=config.lora,
        objective=Objective(
            config.algorithm,
            loss=load_loss(config.algorithm),
            teacher_weight=config.teacher.weight,
        ),
        model_path=config.model.path,
        teacher_path=config.teacher.path,
        critic=config.critic if config.algorithm.advantage == Advantage.gae else None,
        device=device,
        temperature=config.rollout.temperature,
        seed=config.seed,
        num_optimizer_steps=config.trainer.num_optimizer_steps,
        num_critic_only_steps=config.critic.warmup_steps * config.trainer.optimizer_steps_per_step,
        num_passes=config.trainer.num_passes,
        on_forward=on_forward,
    )


def build_engine(
    settings: WorkerSettings, engine: EngineConfig, *, sleeps: bool, keeps_parked: bool
) -> VllmEngine:
    """Start vLLM; `engine` has no auto left. With `sleeps` it gives up its memory for each update,
    and keeps no parked samples; else it keeps their KV cache with `keeps_parked`.
    """
    with imports_frozen():
        from april_rl.training.engine.vllm_engine import VllmEngine

    config = settings.config
    return VllmEngine(
        engine,
        model_path=config.model.path,
        seed=config.seed,
        temperature=config.rollout.temperature,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        keeps_parked=keeps_parked,
        sleeps=sleeps,
        stop_tokens=settings.stop_tokens,
        lora=config.lora if sends_adapter(config.lora) else None,
        reports_experts=config.learner.router_replay is RouterReplay.engine,
    )
