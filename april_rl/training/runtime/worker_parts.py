"""The parts of a worker, built from the configuration: a rank of the learner and of an engine.

Each library is imported where it is needed: a worker that only evaluates loads no learner, and a
learner by itself needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage, LoraSync, RouterReplay
from april_rl.config.engine import EngineConfig
from april_rl.metrics import Metrics
from april_rl.training.rollout.garbage_collection import imports_frozen

if TYPE_CHECKING:
    from april_rl.training.batch.packing import MicroBatch
    from april_rl.training.engine.vllm_engine import VllmEngine
    from april_rl.training.learner.learner import Learner
    from april_rl.training.learner.objective import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The run's configuration, and what follows from it and the machine."""

    config: TrainConfig
    device: str  # cpu or cuda (ROCm's torch calls its devices cuda too)
    threads: int  # torch's threads on CPU
    max_model_len: int  # longest prompt with its response in the engine
    max_num_seqs: int  # requests that the engine computes together
    stop_tokens: tuple[int, ...]  # tokens that end a turn


Update = Callable[[Sequence[Sequence["MicroBatch"]]], Metrics]


def build_learner(
    config: TrainConfig,
    *,
    device: str,
    on_forward: Callable[[], None] | None = None,
    watch: Watch | None = None,
) -> tuple[Learner, Update]:
    """Load this rank's shard, and a critic's if there is one; a collective. Return the learner, and
    the function that makes an update. `on_forward` is called after each forward pass, `watch` by
    the objective.
    """
    with imports_frozen():
        from april_rl.training.learner.critic import ActorCritic, Critic
        from april_rl.training.learner.learner import Learner
        from april_rl.training.learner.mesh import Site
        from april_rl.training.learner.model.attention import use_flash_attention_4
        from april_rl.training.learner.objective import Objective
        from april_rl.training.learner.own_loss import load_loss

    if config.learner.flash_attention_4:
        use_flash_attention_4()
    site = Site.of(config.learner, device=device, on_forward=on_forward)
    trainer, critic = config.trainer, None
    num_steps_alone = config.critic.warmup_steps * trainer.optimizer_steps_per_step
    if config.algorithm.advantage == Advantage.gae:
        critic = Critic(
            config.critic,
            site,
            model_path=config.model.path,
            learner=config.learner,
            optimizer=config.optimizer,
            num_optimizer_steps=trainer.num_optimizer_steps,
            num_steps_alone=num_steps_alone,
        )
    learner = Learner(
        config.learner,
        site,
        optimizer=config.optimizer,
        lora=config.lora,
        objective=Objective(
            config.algorithm,
            loss=load_loss(config.algorithm),
            teacher_weight=config.teacher.weight,
            watch=watch,
        ),
        model_path=config.model.path,
        teacher_path=config.teacher.path,
        beside={"critic.": critic.trained} if critic else {},
        temperature=config.rollout.temperature,
        seed=config.seed,
        num_optimizer_steps=trainer.num_optimizer_steps - (num_steps_alone if critic else 0),
        num_passes=trainer.num_passes,
    )
    if critic is None:
        return learner, learner.update
    return learner, ActorCritic(learner, critic, num_passes=trainer.num_passes).update


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
        lora=config.lora if config.lora.sync is LoraSync.adapter else None,
        reports_experts=config.learner.router_replay is RouterReplay.engine,
    )
