"""Checks that involve more than one section of a configuration."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass

from april_rl.config.checks import require
from april_rl.config.choices import (
    SAMPLE_BY_SAMPLE,
    Advantage,
    Correction,
    Device,
    KvCacheDtype,
    Loss,
    Ratio,
    Resume,
    RouterReplay,
    Sleep,
)
from april_rl.config.prompt_sets import training_sets
from april_rl.config.schema import TrainConfig


def check_consistency(config: TrainConfig) -> None:
    """Raise ValueError naming the first key that contradicts another or has no valid value."""
    _check_values(config)
    require(0 <= config.seed < 2**32, f"seed must be in [0, 2**32), got {config.seed}")
    _check_rollout(config)
    _check_environment(config)
    _check_evaluation(config)
    _check_steps(config)
    check_layout(config)
    _check_engine(config)
    _check_data_sets(config)
    _check_models_beside(config)


def _check_values(section: object, prefix: str = "") -> None:
    """Check that numbers are finite, and that a text is not empty where null means "not set"."""
    assert is_dataclass(section), section
    for entry in fields(section):
        key, value = f"{prefix}{entry.name}", getattr(section, entry.name)
        if is_dataclass(value):
            _check_values(value, f"{key}.")
        is_finite = not isinstance(value, float) or math.isfinite(value)
        require(is_finite, f"{key} must be a finite number, got {value}")
        is_empty = value == "" and "None" in str(entry.type)
        require(not is_empty, f"{key} is empty: write {key}=null, or remove it")


def _check_rollout(config: TrainConfig) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    size, factor = rollout.group_size, rollout.over_sampling_factor
    is_own = algorithm.advantage not in Advantage.__members__
    require(
        size >= 2 or is_own or algorithm.advantage in SAMPLE_BY_SAMPLE,
        f"rollout.group_size must be >= 2 with algorithm.advantage={algorithm.advantage}, "
        f"which compares the samples of a group (reinforce_pp, gae and none do not), got {size}",
    )
    require(
        size >= 2 or not algorithm.dynamic_sampling,
        "rollout.group_size must be >= 2 with algorithm.dynamic_sampling, which rejects groups "
        f"whose rewards are all equal, got {size}",
    )
    residence = max(1.0, factor - 1)
    require(
        not (rollout.refill or factor > 1) or rollout.max_staleness >= residence,
        f"rollout.max_staleness must be >= {residence:g} with "
        f"rollout.over_sampling_factor={factor:g} (a sample stays "
        f"about that many steps), got {rollout.max_staleness}",
    )
    longest, keys = longest_sequence(config)
    require(
        config.learner.max_tokens >= longest,
        f"learner.max_tokens must hold the longest sequence, {keys} = {longest}, got "
        f"{config.learner.max_tokens}",
    )


def longest_sequence(config: TrainConfig) -> tuple[int, str]:
    """Return the tokens of the longest sequence that is trained, and the settings that set it."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    keys = "data.max_prompt_tokens + rollout.max_response_tokens"
    if config.observation_tokens:
        keys += " + environment.max_observation_tokens"
    return longest + config.observation_tokens, keys


def _check_environment(config: TrainConfig) -> None:
    sets = {
        "data": config.data.environment,
        **{f"data.sources.{name}": each.environment for name, each in config.data.sources.items()},
        **{f"evaluation.sets.{k}": each.environment for k, each in config.evaluation.sets.items()},
    }
    used = [f"{key}.environment=true" for key, is_used in sets.items() if is_used]
    is_set = config.environment.is_set
    require(
        is_set or not used,
        f"{' and '.join(used)} needs environment.function (a class, tools or an agent) or "
        "environment.command",
    )
    require(
        not is_set or bool(used),
        f"{config.environment.setting if is_set else ''} has no effect: no data set has an "
        "environment; set data.environment=true, or environment=true of a source",
    )
    functions = [each.function for each in config.reward.functions.values()]
    require(
        is_set or "environment" not in (functions or [config.reward.function]),
        "the reward function environment reads what an environment gave, and there is none: set "
        "data.environment=true and environment.function=module:Class, or choose another reward",
    )
    _check_turns(config)


def _check_turns(config: TrainConfig) -> None:
    is_by_turn = config.algorithm.advantage == Advantage.grpo_by_turn
    require(
        config.environment.is_set or not is_by_turn,
        "algorithm.advantage=grpo_by_turn equals grpo if no environment rewards turns: set "
        "environment.function, or algorithm.advantage=grpo",
    )
    for name, each in training_sets(config.data).items() if is_by_turn else ():
        require(
            not each.environment or config.reward.environment_weight(name) != 0,
            f"algorithm.advantage=grpo_by_turn compares the rewards of turns, and the reward of "
            f"{f'data.sources.{name}' if name else 'data.path'} does not have them: give it "
            "reward.function=environment, or one of reward.functions with function: environment "
            "and a weight other than 0, or take algorithm.advantage=grpo",
        )


_ESTIMATES = ("avg_at_k", "pass_at_k", "maj_at_k")


def _check_evaluation(config: TrainConfig) -> None:
    metric = config.checkpoint.best_metric
    known = [f"eval/{key}/{one}" for key in config.evaluation.sets for one in _ESTIMATES]
    require(
        not metric or metric in known,
        f"checkpoint.best_metric={metric} is not measured; choices: {', '.join(known) or 'none'} "
        "(evaluation.sets)",
    )


def _check_steps(config: TrainConfig) -> None:
    num_steps, drain = config.trainer.num_steps, config.rollout.drain_steps
    num_updates, warmup = config.trainer.num_optimizer_steps, config.optimizer.warmup_steps
    require(
        warmup < num_updates,
        "optimizer.warmup_steps must be < trainer.num_steps * trainer.num_minibatches * "
        f"trainer.num_passes ({num_updates} optimizer steps), got {warmup}",
    )
    algorithm, num_passes = config.algorithm, config.trainer.num_passes
    is_current = algorithm.ratio is Ratio.behaviour and algorithm.correction is not Correction.none
    require(
        num_passes == 1 or algorithm.loss != Loss.policy_gradient or is_current,
        f"trainer.num_passes={num_passes} trains tokens again after the policy has moved, and "
        "algorithm.loss=policy_gradient has no ratio that accounts for that: take a loss with a "
        "ratio, such as ppo_clip, or algorithm.ratio=behaviour with algorithm.correction=truncate",
    )
    require(
        drain < num_steps,
        f"rollout.drain_steps must be < trainer.num_steps ({num_steps}), got {drain}",
    )
    outside = [step for step in config.profiler.steps if not 1 <= step <= num_steps]
    require(
        not outside,
        f"profiler.steps={config.profiler.steps} names steps that the run does not have: {outside} "
        f"(trainer.num_steps={num_steps})",
    )


def check_layout(config: TrainConfig) -> None:
    """Check what depends on the device and the number of workers, unless they are auto."""
    gives_up = config.engine.sleep is Sleep.always and config.runtime.device is Device.gpu
    require(
        not (gives_up and config.rollout.resume is Resume.keep),
        "engine.sleep=always gives up the KV cache at every update, which rollout.resume=keep "
        "needs: take engine.sleep=auto or never, or rollout.resume=reprefill",
    )
    size, workers = config.learner.shard_size, config.runtime.num_workers
    if isinstance(workers, str):
        return
    together = config.engine.tensor_parallel_size
    require(
        workers % together == 0,
        f"runtime.num_workers must be a multiple of engine.tensor_parallel_size={together}, the "
        f"workers that compute one engine together, got {workers}",
    )
    require(
        size is None or workers % size == 0,
        f"runtime.num_workers must be a multiple of learner.shard_size={size}, the workers that "
        f"share one copy of the weights, got {workers}: give learner.shard_size=null to share "
        "it among all",
    )


def _check_engine(config: TrainConfig) -> None:
    engine, algorithm = config.engine, config.algorithm
    is_corrected = algorithm.correction is not Correction.none or algorithm.ratio is Ratio.behaviour
    require(
        engine.kv_cache_dtype is KvCacheDtype.auto or is_corrected,
        f"engine.kv_cache_dtype={engine.kv_cache_dtype.name} samples from another distribution "
        "than the learner's, which algorithm.correction=none does not correct: take truncate or "
        "mask, or algorithm.ratio=behaviour",
    )
    setting = "engine.args.speculative_config"
    require(
        not (engine.guesses and config.deterministic),
        f"{setting} draws noise that depends on what else is computed at the time, so the same "
        "seeds give other samples: remove it, or take deterministic=false",
    )
    require(
        not (engine.guesses and config.rollout.resume is Resume.keep),
        f"{setting} has guesses under way between two engine steps, which a sample that is "
        "parked with its KV cache cannot keep: take rollout.resume=reprefill",
    )
    require(
        engine.prefix_caching or config.learner.router_replay is not RouterReplay.engine,
        "learner.router_replay=engine needs engine.prefix_caching=true, because vLLM stores the "
        "experts of a token with the blocks of its prefix cache: set it, or take "
        "learner.router_replay=learner",
    )


def _check_data_sets(config: TrainConfig) -> None:
    """Check that a name means one data set, because rewards, environments and prompts are found by
    it, and that each is scored by reward functions, of which there are enough.
    """
    shared = sorted(config.data.sources.keys() & config.evaluation.sets.keys())
    require(
        not shared,
        f"data.sources and evaluation.sets both have {', '.join(shared)}: rewards and environments "
        "are chosen by the name of the data set; rename one of the two",
    )
    functions = config.reward.functions
    require(
        len(functions) >= 2 or config.algorithm.advantage != Advantage.gdpo,
        "algorithm.advantage=gdpo scales reward.functions one by one and needs two or more, got "
        f"{len(functions)}: add one, or take algorithm.advantage=grpo",
    )
    known = {*config.data.sources, *config.evaluation.sets}
    for name, function in functions.items():
        unknown = sorted(set(function.sources or ()) - known)
        require(
            not unknown,
            f"reward.functions.{name}.sources names {', '.join(unknown)}; data.sources and "
            f"evaluation.sets have {', '.join(sorted(known)) or 'none'}",
        )
    unnamed = [] if config.data.sources else ["data.path"]
    for dataset in [*sorted(known), *unnamed] if functions else []:
        require(
            any(f.sources is None or dataset in f.sources for f in functions.values()),
            f"no function of reward.functions scores {dataset}: add it to the sources of one, or "
            "remove the sources of one",
        )


def _check_models_beside(config: TrainConfig) -> None:
    """Check that a teacher, a critic and a reference are used where there is one, and that the
    policy is trained.
    """
    teacher, critic, algorithm = config.teacher, config.critic, config.algorithm
    require(
        teacher.is_set or algorithm.advantage != Advantage.none,
        "algorithm.advantage=none trains nothing without a teacher: set teacher.path, or another "
        "advantage",
    )
    require(
        not teacher.base_url or config.rollout.temperature == 1,
        f"teacher.base_url: a server's log-probabilities are at temperature 1, so "
        f"rollout.temperature must be 1, got {config.rollout.temperature:g}",
    )
    require(
        not algorithm.dynamic_sampling or algorithm.advantage != Advantage.none,
        "algorithm.dynamic_sampling rejects groups of equal rewards, which algorithm.advantage="
        "none does not read: remove one of the two",
    )
    for entry in fields(critic) if algorithm.advantage != Advantage.gae else ():
        value = getattr(critic, entry.name)
        require(
            value == entry.default,
            f"critic.{entry.name}={value} has no effect with algorithm.advantage="
            f"{algorithm.advantage}; set algorithm=ppo, or remove it",
        )
    require(
        critic.warmup_steps < config.trainer.num_steps,
        f"critic.warmup_steps must be < trainer.num_steps ({config.trainer.num_steps}), got "
        f"{critic.warmup_steps}: the policy would never be trained",
    )
    every = algorithm.reference_every
    require(
        every is None or config.lora.rank is None,
        f"algorithm.reference_every={every}: with lora.rank={config.lora.rank} the reference is "
        "the policy without its adapters, which does not move; set one of the two to null",
    )
