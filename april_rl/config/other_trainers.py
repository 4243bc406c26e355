"""Names of settings in TRL, verl and slime, and what docs/coming_from.md says about them."""

from __future__ import annotations

from collections.abc import Iterator

_PAGE = "docs/coming_from.md"
_TRAINERS = ("TRL", "verl", "slime")
# Each row has our setting, or a sentence if we have none, and its names in TRL, verl and slime.
_ROWS = (
    "model.path | model_name_or_path | actor_rollout_ref.model.path | --hf-checkpoint",
    "trainer.num_groups | generation_batch_size | data.train_batch_size | --rollout-batch-size",
    "trainer.num_minibatches | steps_per_generation, gradient_accumulation_steps | "
    "actor_rollout_ref.actor.ppo_mini_batch_size | --num-steps-per-rollout",
    "trainer.num_passes | num_iterations | ppo_epochs |",
    "trainer.num_steps | max_steps, num_train_epochs | "
    "trainer.total_training_steps, trainer.total_epochs | --num-rollout, --num-epoch",
    "rollout.group_size | num_generations | actor_rollout_ref.rollout.n | --n-samples-per-prompt",
    "rollout.max_response_tokens | max_completion_length | data.max_response_length | "
    "--rollout-max-response-len",
    "rollout.temperature | | rollout.temperature | --rollout-temperature",
    "rollout.over_sampling_factor | | rollout.over_sample_rate, trainer.v1.trainer_mode | "
    "--over-sampling-batch-size",
    "rollout.max_staleness | | trainer.v1.sampler.max_off_policy_threshold |",
    "rollout.on_stale | | trainer.v1.sampler.max_off_policy_strategy | "
    "--mask-offpolicy-in-partial-rollout",
    "rollout.refill | | | --partial-rollout",
    "learner.max_tokens | per_device_train_batch_size | ppo_max_token_len_per_gpu | "
    "--max-tokens-per-gpu",
    "learner.activation_checkpointing | gradient_checkpointing | "
    "model.enable_gradient_checkpointing |",
    "learner.offload | | fsdp_config.optimizer_offload |",
    "algorithm.advantage | scale_rewards, multi_objective_aggregation | "
    "algorithm.norm_adv_by_std_in_grpo, adv_estimator, algorithm.gdpo_reward_keys | "
    "--advantage-estimator",
    "algorithm.loss | loss_type, importance_sampling_level | policy_loss.loss_mode |",
    "algorithm.clip_low | epsilon | clip_ratio_low | --eps-clip",
    "algorithm.clip_high | epsilon_high | clip_ratio_high | --eps-clip-high",
    "algorithm.dual_clip | delta | clip_ratio_c | --eps-clip-c",
    "algorithm.kl_coefficient | beta | kl_loss_coef, algorithm.kl_ctrl.kl_coef | "
    "--kl-loss-coef, --kl-coef",
    "algorithm.reference_every | sync_ref_model, ref_model_sync_steps, ref_model_mixup_alpha | | "
    "--ref-update-interval",
    "algorithm.entropy_coefficient | entropy_coef | entropy_coeff | --entropy-coef",
    "algorithm.entropy_target | use_adaptive_entropy, entropy_target | |",
    "algorithm.correction | vllm_importance_sampling_correction | algorithm.rollout_correction | "
    "--use-tis",
    "algorithm.tis_cap | vllm_importance_sampling_clip_max | | --tis-clip",
    "algorithm.opsm_threshold | off_policy_mask_threshold | | --use-opsm, --opsm-delta",
    "algorithm.mask_truncated | mask_truncated_completions | |",
    "algorithm.dynamic_sampling | | algorithm.filter_groups | --dynamic-sampling-filter-path",
    "algorithm.aggregation | | loss_agg_mode |",
    "algorithm.kl | | use_kl_loss, kl_loss_type, algorithm.use_kl_in_reward | "
    "--use-kl-loss, --kl-loss-type",
    "teacher.path | teacher_model_name_or_path | "
    "distillation.teacher_models.teacher_model.model_path | --use-opd, --opd-teacher-load",
    "teacher.weight | | | --opd-kl-coef",
    "optimizer.lr | learning_rate | actor.optim.lr |",
    "optimizer.max_grad_norm | | actor.grad_clip |",
    "data.path | train_dataset | data.train_files | --prompt-data",
    "data.max_prompt_tokens | | data.max_prompt_length | --rollout-max-prompt-len",
    "data.prompt_column | | data.prompt_key | --input-key",
    "data.answer_column | | | --label-key",
    "reward.function | reward_funcs | custom_reward_function.path, custom_reward_function.name | "
    "--custom-rm-path",
    "reward.functions | reward_weights | algorithm.gdpo_reward_weights |",
    "environment.function | environment_factory, tools | rollout.multi_turn | "
    "--custom-generate-function-path",
    "evaluation.sets | eval_dataset | data.val_files | --eval-prompt-data",
    "evaluation.every | eval_steps | trainer.test_freq | --eval-interval",
    "evaluation.num_samples | num_generations_eval | rollout.val_kwargs.n | "
    "--n-samples-per-eval-prompt",
    "engine.gpu_memory_utilization | vllm_gpu_memory_utilization | "
    "rollout.gpu_memory_utilization | --sglang-mem-fraction-static",
    "engine.sleep | vllm_enable_sleep_mode | rollout.free_cache_engine | --offload",
    "engine.tensor_parallel_size | vllm_tensor_parallel_size | "
    "rollout.tensor_model_parallel_size | --rollout-num-gpus-per-engine",
    "runtime.num_workers | vllm_mode | trainer.nnodes, trainer.n_gpus_per_node | "
    "--colocate, --actor-num-gpus-per-node",
    "lora.rank | peft_config | model.lora_rank |",
    "lora.alpha | | model.lora_alpha |",
    "checkpoint.every_steps | save_steps | trainer.save_freq | --save-interval",
    "hydra.run.dir | output_dir | trainer.default_local_dir | --save",
    "tracking.backends | report_to | trainer.logger | --use-wandb",
    "critic.path | | critic.model.path | --critic-load",
    "critic.lr | | critic.optim.lr | --critic-lr",
    "critic.policy_lambda | | algorithm.lam | --lambd",
    "critic.value_clip | | critic.cliprange_value | --value-clip",
    "critic.warmup_steps | | trainer.critic_warmup | --num-critic-only-steps",
    "no top-p or top-k in training | top_p, top_k, min_p | rollout.top_p, rollout.top_k | "
    "--rollout-top-p, --rollout-top-k",
    "always vLLM | use_vllm | rollout.name |",
    "resume=auto | resume_from_checkpoint | trainer.resume_mode | --load",
    "always before the first step | | trainer.val_before_train |",
)
_TABLE = [[cell.strip() for cell in row.split("|")] for row in _ROWS]
NAMES = {
    trainer: {name: row[0] for row in _TABLE for name in row[column].split(", ") if name}
    for column, trainer in enumerate(_TRAINERS, start=1)
}


def is_name(key: str) -> bool:
    return any(_as_key(name) == key for _, name, _ in _all_names())


def translate_name(key: str) -> str:
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
    for trainer, names in NAMES.items():
        for name, here in names.items():
            yield trainer, name, here


def _as_key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _is_meant(name: str, key: str) -> bool:
    return f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")
