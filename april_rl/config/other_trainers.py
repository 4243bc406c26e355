"""Names of settings in TRL, verl and slime, and what docs/coming_from.md says of them."""

from __future__ import annotations

from collections.abc import Iterator

_PAGE = "docs/coming_from.md"
NAMES: dict[str, dict[str, str]] = {
    "TRL": {
        "model_name_or_path": "model.path",
        "generation_batch_size": "trainer.num_groups",
        "num_generations": "rollout.group_size",
        "steps_per_generation": "trainer.num_minibatches",
        "gradient_accumulation_steps": "trainer.num_minibatches",
        "num_iterations": "trainer.num_passes",
        "max_steps": "trainer.num_steps",
        "num_train_epochs": "trainer.num_steps",
        "per_device_train_batch_size": "learner.max_tokens",
        "max_completion_length": "rollout.max_response_tokens",
        "scale_rewards": "algorithm.advantage",
        "multi_objective_aggregation": "algorithm.advantage",
        "loss_type": "algorithm.loss",
        "importance_sampling_level": "algorithm.loss",
        "epsilon": "algorithm.clip_low",
        "epsilon_high": "algorithm.clip_high",
        "delta": "algorithm.dual_clip",
        "beta": "algorithm.kl_coefficient",
        "entropy_coef": "algorithm.entropy_coefficient",
        "use_adaptive_entropy": "algorithm.entropy_target",
        "entropy_target": "algorithm.entropy_target",
        "vllm_importance_sampling_correction": "algorithm.correction",
        "vllm_importance_sampling_clip_max": "algorithm.tis_cap",
        "off_policy_mask_threshold": "algorithm.opsm_threshold",
        "mask_truncated_completions": "algorithm.mask_truncated",
        "top_p": "no top-p or top-k in training",
        "top_k": "no top-p or top-k in training",
        "min_p": "no top-p or top-k in training",
        "learning_rate": "optimizer.lr",
        "train_dataset": "data.path",
        "reward_funcs": "reward.function",
        "reward_weights": "reward.functions",
        "environment_factory": "environment.function",
        "tools": "environment.function",
        "eval_dataset": "evaluation.sets",
        "eval_steps": "evaluation.every",
        "num_generations_eval": "evaluation.num_samples",
        "use_vllm": "always vLLM",
        "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
        "vllm_enable_sleep_mode": "engine.sleep",
        "vllm_tensor_parallel_size": "engine.tensor_parallel_size",
        "vllm_mode": "runtime.num_workers",
        "gradient_checkpointing": "learner.activation_checkpointing",
        "peft_config": "lora.rank",
        "save_steps": "checkpoint.every_steps",
        "resume_from_checkpoint": "resume=auto",
        "output_dir": "hydra.run.dir",
        "report_to": "tracking.backends",
    },
    "verl": {
        "actor_rollout_ref.model.path": "model.path",
        "data.train_batch_size": "trainer.num_groups",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.num_minibatches",
        "ppo_epochs": "trainer.num_passes",
        "trainer.total_training_steps": "trainer.num_steps",
        "trainer.total_epochs": "trainer.num_steps",
        "ppo_max_token_len_per_gpu": "learner.max_tokens",
        "data.max_response_length": "rollout.max_response_tokens",
        "data.max_prompt_length": "data.max_prompt_tokens",
        "rollout.temperature": "rollout.temperature",
        "rollout.top_p": "no top-p or top-k in training",
        "rollout.top_k": "no top-p or top-k in training",
        "rollout.over_sample_rate": "rollout.over_sampling_factor",
        "trainer.v1.trainer_mode": "rollout.over_sampling_factor",
        "trainer.v1.sampler.max_off_policy_threshold": "rollout.max_staleness",
        "trainer.v1.sampler.max_off_policy_strategy": "rollout.on_stale",
        "algorithm.filter_groups": "algorithm.dynamic_sampling",
        "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage",
        "adv_estimator": "algorithm.advantage",
        "algorithm.gdpo_reward_keys": "algorithm.advantage",
        "algorithm.gdpo_reward_weights": "reward.functions",
        "policy_loss.loss_mode": "algorithm.loss",
        "clip_ratio_low": "algorithm.clip_low",
        "clip_ratio_high": "algorithm.clip_high",
        "clip_ratio_c": "algorithm.dual_clip",
        "loss_agg_mode": "algorithm.aggregation",
        "use_kl_loss": "algorithm.kl",
        "kl_loss_type": "algorithm.kl",
        "kl_loss_coef": "algorithm.kl_coefficient",
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coefficient",
        "entropy_coeff": "algorithm.entropy_coefficient",
        "algorithm.rollout_correction": "algorithm.correction",
        "actor.optim.lr": "optimizer.lr",
        "actor.grad_clip": "optimizer.max_grad_norm",
        "data.train_files": "data.path",
        "data.prompt_key": "data.prompt_column",
        "custom_reward_function.path": "reward.function",
        "custom_reward_function.name": "reward.function",
        "rollout.multi_turn": "environment.function",
        "data.val_files": "evaluation.sets",
        "trainer.test_freq": "evaluation.every",
        "trainer.val_before_train": "always before the first step",
        "rollout.val_kwargs.n": "evaluation.num_samples",
        "rollout.name": "always vLLM",
        "rollout.gpu_memory_utilization": "engine.gpu_memory_utilization",
        "rollout.free_cache_engine": "engine.sleep",
        "rollout.tensor_model_parallel_size": "engine.tensor_parallel_size",
        "trainer.nnodes": "runtime.num_workers",
        "trainer.n_gpus_per_node": "runtime.num_workers",
        "model.enable_gradient_checkpointing": "learner.activation_checkpointing",
        "fsdp_config.optimizer_offload": "learner.offload",
        "model.lora_rank": "lora.rank",
        "model.lora_alpha": "lora.alpha",
        "trainer.save_freq": "checkpoint.every_steps",
        "trainer.resume_mode": "resume=auto",
        "trainer.default_local_dir": "hydra.run.dir",
        "trainer.logger": "tracking.backends",
    },
    "slime": {
        "--hf-checkpoint": "model.path",
        "--rollout-batch-size": "trainer.num_groups",
        "--n-samples-per-prompt": "rollout.group_size",
        "--num-steps-per-rollout": "trainer.num_minibatches",
        "--num-rollout": "trainer.num_steps",
        "--num-epoch": "trainer.num_steps",
        "--max-tokens-per-gpu": "learner.max_tokens",
        "--rollout-max-response-len": "rollout.max_response_tokens",
        "--rollout-max-prompt-len": "data.max_prompt_tokens",
        "--rollout-temperature": "rollout.temperature",
        "--rollout-top-p": "no top-p or top-k in training",
        "--rollout-top-k": "no top-p or top-k in training",
        "--over-sampling-batch-size": "rollout.over_sampling_factor",
        "--partial-rollout": "rollout.refill",
        "--mask-offpolicy-in-partial-rollout": "rollout.on_stale",
        "--dynamic-sampling-filter-path": "algorithm.dynamic_sampling",
        "--advantage-estimator": "algorithm.advantage",
        "--eps-clip": "algorithm.clip_low",
        "--eps-clip-high": "algorithm.clip_high",
        "--eps-clip-c": "algorithm.dual_clip",
        "--use-kl-loss": "algorithm.kl",
        "--kl-loss-type": "algorithm.kl",
        "--kl-loss-coef": "algorithm.kl_coefficient",
        "--kl-coef": "algorithm.kl_coefficient",
        "--entropy-coef": "algorithm.entropy_coefficient",
        "--use-tis": "algorithm.correction",
        "--tis-clip": "algorithm.tis_cap",
        "--use-opsm": "algorithm.opsm_threshold",
        "--opsm-delta": "algorithm.opsm_threshold",
        "--prompt-data": "data.path",
        "--input-key": "data.prompt_column",
        "--label-key": "data.answer_column",
        "--custom-rm-path": "reward.function",
        "--custom-generate-function-path": "environment.function",
        "--eval-prompt-data": "evaluation.sets",
        "--eval-interval": "evaluation.every",
        "--n-samples-per-eval-prompt": "evaluation.num_samples",
        "--sglang-mem-fraction-static": "engine.gpu_memory_utilization",
        "--offload": "engine.sleep",
        "--rollout-num-gpus-per-engine": "engine.tensor_parallel_size",
        "--colocate": "runtime.num_workers",
        "--actor-num-gpus-per-node": "runtime.num_workers",
        "--save-interval": "checkpoint.every_steps",
        "--load": "resume=auto",
        "--save": "hydra.run.dir",
        "--use-wandb": "tracking.backends",
    },
}


def is_name(key: str) -> bool:
    """Return whether another trainer has a setting with exactly this key."""
    return any(_as_key(name) == key for _, name, _ in _all_names())


def called_here(key: str) -> str:
    """Return our name for a setting of another trainer, given its name with or without its
    sections; empty if no other trainer has it.
    """
    found = [entry for entry in _all_names() if _is_meant(_as_key(entry[1]), key)]
    found.sort(key=lambda entry: _as_key(entry[1]) != key)  # prefer a name that equals the key
    if found:
        trainer, name, here = found[0]
        # The table has a sentence, or the name of a setting.
        verb = ":" if " " in here else " is here:"
        return f"{trainer}'s {name}{verb} {here} ({_PAGE})"
    owners = [trainer for trainer, name, _ in _all_names() if name.startswith(f"{key}.")]
    return f"it is a section of {owners[0]}; {_PAGE} has its settings" if owners else ""


def _all_names() -> Iterator[tuple[str, str, str]]:
    """Yield trainer, name there, and name here."""
    for trainer, names in NAMES.items():
        for name, here in names.items():
            yield trainer, name, here


def _as_key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _is_meant(name: str, key: str) -> bool:
    return f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")
