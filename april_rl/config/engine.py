"""Settings of the engine: vLLM's precision, memory and parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from april_rl.config.checks import check_bounds, require, within
from april_rl.config.choices import ComputeDtype, KvCacheDtype, Sleep

# vLLM's options that the run itself sets: from other settings, or because samples need them so.
_SET_BY_RUN = """
    model model_weights tokenizer runner revision hf_overrides quantization load_format seed dtype
    max_model_len max_num_seqs enable_prefix_caching kv_cache_dtype kv_cache_memory_bytes watermark
    gpu_memory_utilization block_size enforce_eager compilation_config ir_op_priority logprobs_mode
    enable_sleep_mode scheduler_cls worker_cls distributed_executor_backend tensor_parallel_size
    pipeline_parallel_size data_parallel_size disable_custom_all_reduce language_model_only
    skip_tokenizer_init enable_return_routed_experts disable_log_stats use_tqdm_on_load enable_lora
    max_loras max_lora_rank lora_target_modules logits_processors spec_method spec_model spec_tokens
    quantization_config kv_sharing_fast_prefill num_gpu_blocks_override cpu_offload_gb
    worker_extension_cls trust_remote_code scheduling_policy headless kv_transfer_config
    watermark_config"""
_GUESSES = {"method": "ngram", "num_speculative_tokens": 4}  # as an example


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """The inference side: vLLM."""

    dtype: ComputeDtype = ComputeDtype.auto
    # limit of prompt and response tokens; auto: the longest of training and evaluations
    max_model_len: int | str = within(">= 1 or auto", "auto")
    # requests computed together; auto: as many as it has slots
    max_num_seqs: int | str = within(">= 1 or auto", "auto")
    kv_cache_gib: float = within("> 0", 1.0)  # size of the KV cache on CPU
    # on GPU: the engine's share of GPU memory; auto: the largest share that leaves room for the
    # learner's update, if the KV cache then holds the samples in flight; otherwise 0.85, or less if
    # weights and optimizer state stay on the GPU, and the engine sleeps during updates
    gpu_memory_utilization: int | float | str = within("in (0, 1) or auto", 0.6)
    # on GPU: whether weights and KV cache leave the device while the learner updates. An engine
    # that stays awake saves the time of sleeping and waking and can keep parked samples
    # (rollout.resume=keep), but its share and the learner's peak must fit together. auto: the
    # memory plan decides, and the run says why
    sleep: Sleep = Sleep.auto
    tensor_parallel_size: int = within(">= 1", 1)  # workers that share one engine, on one node
    # on GPU; false: eager mode, which needs no compiler, starts in seconds and samples more slowly
    cuda_graphs: bool = True
    # samples of a group share their prompt's KV cache; set it to false if layers have a state
    prefix_caching: bool = True
    # auto: the precision of engine.dtype; fp8 holds twice the tokens, but samples from another
    # distribution than the learner's, so algorithm.correction or algorithm.ratio=behaviour has to
    # correct for it; mismatch/ shows the difference, learner.max_mismatch may have to be higher
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.auto
    # vLLM's own options, such as max_num_batched_tokens (of one engine step; 8192),
    # async_scheduling (on GPUs) and speculative_config of method ngram. Experimental, for an engine
    # that sleeps: sleep_mode_offload_cudagraph and enable_nccl_comm_suspend free 1.4 and 1 GiB
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def max_batched_tokens(self) -> int:
        tokens: int = self.args.get("max_num_batched_tokens", 8192)
        return tokens

    @property
    def guesses(self) -> bool:
        return bool(self.args.get("speculative_config"))

    def __post_init__(self) -> None:
        check_bounds("engine", self)
        for name in self.args:
            require(
                name not in _SET_BY_RUN.split(),
                f"engine.args.{name}: the run itself sets this option of vLLM; remove it",
            )
        tokens, ahead = self.max_batched_tokens, self.args.get("async_scheduling", True)
        require(
            type(tokens) is int and tokens > 0,
            f"engine.args.max_num_batched_tokens must be a whole number >= 1, got {tokens}",
        )
        require(
            type(ahead) is bool,
            f"engine.args.async_scheduling must be true or false, got {ahead}",
        )
        require(
            not (self.guesses and self.args.get("async_scheduling")),
            "engine.args.async_scheduling=true does not work with engine.args.speculative_config, "
            "which guesses from tokens that are not sampled yet",
        )
        guess = self.args.get(
            "speculative_config", {"method": "ngram", "num_speculative_tokens": 4}
        )
        require(
            isinstance(guess, dict)
            and guess.get("method") == "ngram"  # a draft model would have to follow the policy
            and isinstance(guess.get("num_speculative_tokens"), int)
            and guess.get("rejection_sample_method", "standard") == "standard",
            f"engine.args.speculative_config must be like {_GUESSES}, with standard rejection, got "
            f"{guess}",
        )
