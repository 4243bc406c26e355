"""The same recipe at tiny sizes: every stage and every choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.choices import Device, KvCacheDtype, Offload, RouterReplay, Sleep, WandbMode
from april_rl.config.engine import EngineConfig
from april_rl.config.models_beside import TeacherConfig
from april_rl.config.task import (
    DataConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    RewardConfig,
    RewardFunctionConfig,
    SourceConfig,
)

_GROUPS, _GROUP_SIZE, _STEPS, _RESPONSE_TOKENS = 4, 4, 2, 48
_HELD_OUT_PROMPTS, _HELD_OUT_SAMPLES, _HELD_OUT_TOKENS = 2, 2, 16
# A random model answers nothing right. So that rewards differ, and filter, advantages and update
# have something to work on, a second function adds noise.
NOISE = "april_rl.lab.rehearsal.noise:even_sum"


def small_run(
    config: TrainConfig, *, model: str, rows: Mapping[str, Path], held_out: Mapping[str, Path]
) -> TrainConfig:
    """Return the configuration of two steps on CPU with the model in folder `model`.

    `rows` and `held_out` are files that replace the data of each source (the name "" is
    `data.path`) and each evaluation set; other data stays as it is.
    """
    budget = min(_RESPONSE_TOKENS, config.rollout.max_response_tokens)
    num_groups = min(_GROUPS, config.trainer.num_groups)
    return replace(
        config,
        name=f"rehearsal of {config.name}",
        model=replace(config.model, path=model),
        teacher=_teacher(config.teacher, model),
        critic=replace(config.critic, path=None, warmup_steps=min(1, config.critic.warmup_steps)),
        data=_data(config.data, rows),
        reward=_reward(config.reward),
        evaluation=_evaluation(config.evaluation, held_out),
        optimizer=replace(config.optimizer, warmup_steps=min(1, config.optimizer.warmup_steps)),
        trainer=replace(
            config.trainer,
            num_steps=_STEPS,
            num_groups=num_groups,
            num_minibatches=min(num_groups, config.trainer.num_minibatches),
        ),
        checkpoint=replace(config.checkpoint, export_every_steps=1),
        rollout=replace(
            config.rollout,
            group_size=min(_GROUP_SIZE, config.rollout.group_size),
            max_response_tokens=budget,
            drain_steps=0,
            tick_steps=4,
        ),
        learner=replace(
            config.learner,
            max_tokens=2 * (config.data.max_prompt_tokens + budget + config.observation_tokens),
            shard_size=None,
            offload=Offload.none,
            router_replay=_router_replay(config.learner.router_replay),
        ),
        engine=replace(
            config.engine,
            max_model_len="auto",
            max_num_seqs="auto",
            kv_cache_gib=0.5,
            gpu_memory_utilization=EngineConfig().gpu_memory_utilization,  # unused on CPU
            sleep=Sleep.auto,
            tensor_parallel_size=1,
            kv_cache_dtype=KvCacheDtype.auto,
        ),
        runtime=replace(config.runtime, num_workers=1, device=Device.cpu, ray_address=None),
        tracking=replace(
            config.tracking, backends=[], wandb=WandbMode.disabled, save_samples_every=1
        ),
    )


def _router_replay(replay: RouterReplay) -> RouterReplay:
    """Repeat the learner's experts in place of the engine's, which no engine reports on CPU."""
    return RouterReplay.learner if replay is RouterReplay.engine else replay


def _data(data: DataConfig, rows: Mapping[str, Path]) -> DataConfig:
    sources: dict[str, SourceConfig] = {
        name: replace(source, path=str(rows.get(name, source.path)))
        for name, source in data.sources.items()
    }
    return replace(data, path=str(rows.get("", data.path)), sources=sources)


def _reward(reward: RewardConfig) -> RewardConfig:
    functions = reward.functions or {
        "reward": RewardFunctionConfig(function=reward.function, args=reward.args)
    }
    noise = RewardFunctionConfig(function=NOISE)
    return replace(
        reward, function="math_verify", args={}, functions={**functions, "rehearsal_noise": noise}
    )


def _evaluation(evaluation: EvaluationConfig, held_out: Mapping[str, Path]) -> EvaluationConfig:
    sets: dict[str, EvaluationSetConfig] = {
        name: replace(
            chosen,
            path=str(held_out.get(name, chosen.path)),
            num_samples=_HELD_OUT_SAMPLES,
            max_prompts=_HELD_OUT_PROMPTS,
            max_response_tokens=_HELD_OUT_TOKENS,
        )
        for name, chosen in evaluation.sets.items()
    }
    return replace(evaluation, sets=sets, every=1)


def _teacher(given: TeacherConfig, model: str) -> TeacherConfig:
    """Return a teacher in the worker, also in place of one on a server."""
    return TeacherConfig(path=model, weight=given.weight) if given.is_set else given
