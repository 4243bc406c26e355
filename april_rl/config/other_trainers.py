"""Names of settings in other trainers, and what docs/coming_from.md says about them."""

from __future__ import annotations

from collections.abc import Iterator

_PAGE = "docs/coming_from.md"
_TRAINERS = ("TRL", "verl", "slime", "OpenRLHF")
# Each row has our setting, or a sentence if we have none, and its names in these trainers.
_ROWS = (
    "model.path | model_name_or_path | actor_rollout_ref.model.path | --hf-checkpoint | --pretrain",
    "trainer.num_groups, prompts of a step | generation_batch_size | data.train_batch_size | "
    "--rollout-batch-size | --rollout_batch_size",
    "trainer.num_minibatches, optimizer steps of a batch | steps_per_generation, "
    "gradient_accumulation_steps | actor_rollout_ref.actor.ppo_mini_batch_size | "
    "--num-steps-per-rollout | --train_batch_size",
    "trainer.num_passes | num_iterations | ppo_epochs | | --max_epochs",
    "trainer.num_steps, in steps | max_steps, num_train_epochs | trainer.total_training_steps, "
    "trainer.total_epochs | --num-rollout, --num-epoch | --num_episodes",
    "rollout.group_size | num_generations | actor_rollout_ref.rollout.n | --n-samples-per-prompt "
    "| --n_samples_per_prompt",
    "rollout.max_response_tokens | max_completion_length | data.max_response_length | "
    "--rollout-max-response-len | --generate_max_len",
    "rollout.temperature | | rollout.temperature | --rollout-temperature |",
    "rollout.over_sampling_factor, a ratio | | rollout.over_sample_rate, trainer.v1.trainer_mode "
    "| --over-sampling-batch-size | --vllm_generate_batch_size",
    "rollout.max_staleness | | trainer.v1.sampler.max_off_policy_threshold | |",
    "rollout.on_stale | | trainer.v1.sampler.max_off_policy_strategy | "
    "--mask-offpolicy-in-partial-rollout |",
    "rollout.refill | | | --partial-rollout |",
    "learner.max_tokens, in tokens of a packed row | per_device_train_batch_size | "
    "ppo_max_token_len_per_gpu | --max-tokens-per-gpu | --micro_train_batch_size, "
    "--micro_rollout_batch_size, --train_max_tokens_per_gpu",
    "learner.activation_checkpointing | gradient_checkpointing | "
    "model.enable_gradient_checkpointing | | --gradient_checkpointing",
    "learner.offload | | fsdp_config.optimizer_offload | | --adam_offload",
    "algorithm.advantage | scale_rewards, multi_objective_aggregation | "
    "algorithm.norm_adv_by_std_in_grpo, adv_estimator, algorithm.gdpo_reward_keys | "
    "--advantage-estimator | --advantage_estimator",
    "algorithm.loss | loss_type, importance_sampling_level | policy_loss.loss_mode | | "
    "--policy_loss_type",
    "algorithm.clip_low | epsilon | clip_ratio_low | --eps-clip | --eps_clip_low_high",
    "algorithm.clip_high | epsilon_high | clip_ratio_high | --eps-clip-high |",
    "algorithm.dual_clip | delta | clip_ratio_c | --eps-clip-c | --dual_clip",
    "algorithm.kl_coefficient | beta | kl_loss_coef, algorithm.kl_ctrl.kl_coef | --kl-loss-coef, "
    "--kl-coef | --init_kl_coef",
    "algorithm.reference_every, in steps | sync_ref_model, ref_model_sync_steps, "
    "ref_model_mixup_alpha | | --ref-update-interval |",
    "algorithm.entropy_coefficient | entropy_coef | entropy_coeff | --entropy-coef | "
    "--entropy_loss_coef",
    "algorithm.entropy_target | use_adaptive_entropy, entropy_target | | |",
    "algorithm.correction | vllm_importance_sampling_correction | algorithm.rollout_correction | "
    "--use-tis | --enable_vllm_is_correction",
    "algorithm.weight_bounds | vllm_importance_sampling_clip_max | | --tis-clip | "
    "--vllm_is_truncated_threshold",
    "algorithm.opsm_threshold | off_policy_mask_threshold | | --use-opsm, --opsm-delta |",
    "algorithm.mask_truncated | mask_truncated_completions | | |",
    "algorithm.dynamic_sampling | | algorithm.filter_groups | --dynamic-sampling-filter-path | "
    "--dynamic_filtering",
    "algorithm.aggregation | | loss_agg_mode | |",
    "algorithm.kl | | use_kl_loss, kl_loss_type, algorithm.use_kl_in_reward | --use-kl-loss, "
    "--kl-loss-type | --use_kl_loss, --kl_estimator",
    "teacher.path | teacher_model_name_or_path | "
    "distillation.teacher_models.teacher_model.model_path | --use-opd, --opd-teacher-load |",
    "teacher.weight | | | --opd-kl-coef |",
    "optimizer.lr | learning_rate | actor.optim.lr | | --actor_learning_rate",
    "optimizer.max_grad_norm | | actor.grad_clip | | --max_norm",
    "data.path | train_dataset | data.train_files | --prompt-data | --prompt_data",
    "data.max_prompt_tokens | | data.max_prompt_length | --rollout-max-prompt-len | "
    "--prompt_max_len",
    "data.prompt_column | | data.prompt_key | --input-key | --input_key",
    "data.answer_column | | | --label-key | --label_key",
    "reward.function | reward_funcs | custom_reward_function.path, custom_reward_function.name | "
    "--custom-rm-path | --remote_rm_url, --reward_pretrain",
    "reward.functions | reward_weights | algorithm.gdpo_reward_weights | |",
    "environment.function | environment_factory, tools | rollout.multi_turn | "
    "--custom-generate-function-path | --agent_func_path",
    "evaluation.sets | eval_dataset | data.val_files | --eval-prompt-data | --eval_dataset",
    "evaluation.every | eval_steps | trainer.test_freq | --eval-interval | --eval_steps",
    "evaluation.num_samples | num_generations_eval | rollout.val_kwargs.n | "
    "--n-samples-per-eval-prompt | --eval_n_samples_per_prompt",
    "engine.gpu_memory_utilization | vllm_gpu_memory_utilization | "
    "rollout.gpu_memory_utilization | --sglang-mem-fraction-static | "
    "--vllm_gpu_memory_utilization",
    "engine.sleep | vllm_enable_sleep_mode | rollout.free_cache_engine | --offload | "
    "--vllm_enable_sleep",
    "engine.tensor_parallel_size | vllm_tensor_parallel_size | "
    "rollout.tensor_model_parallel_size | --rollout-num-gpus-per-engine | "
    "--vllm_tensor_parallel_size",
    "runtime.num_workers | vllm_mode | trainer.nnodes, trainer.n_gpus_per_node | --colocate, "
    "--actor-num-gpus-per-node | --colocate_all_models, --vllm_num_engines",
    "lora.rank | peft_config | model.lora_rank | | --lora_rank",
    "lora.alpha | | model.lora_alpha | | --lora_alpha",
    "checkpoint.every_steps | save_steps | trainer.save_freq | --save-interval | --save_steps",
    "hydra.run.dir | output_dir | trainer.default_local_dir | --save | --save_path, --ckpt_path",
    "tracking.backends | report_to | trainer.logger | --use-wandb | --use_wandb",
    "critic.path | | critic.model.path | --critic-load | --critic_pretrain",
    "critic.lr | | critic.optim.lr | --critic-lr | --critic_learning_rate",
    "critic.policy_lambda | | algorithm.lam | --lambd | --lambd",
    "critic.value_clip | | critic.cliprange_value | --value-clip | --value_clip",
    "critic.warmup_steps | | trainer.critic_warmup | --num-critic-only-steps | "
    "--freezing_actor_steps",
    "no top-p or top-k in training | top_p, top_k, min_p | rollout.top_p, rollout.top_k | "
    "--rollout-top-p, --rollout-top-k | --top_p",
    "always vLLM | use_vllm | rollout.name | |",
    "resume=auto | resume_from_checkpoint | trainer.resume_mode | --load | --load_checkpoint",
    "always before the first step | | trainer.val_before_train | |",
)
_TABLE = [[cell.strip() for cell in row.split("|")] for row in _ROWS]
NAMES = {
    trainer: {name: row[0] for row in _TABLE for name in row[column].split(", ") if name}
    for column, trainer in enumerate(_TRAINERS, start=1)
}


def is_name(key: str) -> bool:
    return any(_as_key(name) == key for _, name, _ in _all_names())


def translate_name(key: str) -> str:
    """Return our name for another trainer's setting, given without or with its sections; or ''."""
    found = [entry for entry in _all_names() if _is_meant(_as_key(entry[1]), key)]
    found.sort(key=lambda entry: _as_key(entry[1]) != key)  # prefer a name that equals the key
    if found:
        trainer, name, here = found[0]
        # The table has a sentence, or the name of a setting, with its unit where units differ.
        verb = ":" if " " in here.partition(",")[0] else " is here:"
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
