"""vLLM's arguments, from the engine's settings."""

from __future__ import annotations

from typing import Any, get_args

from vllm import EngineArgs
from vllm.config.lora import MaxLoRARanks

from april_rl.config.choices import ComputeDtype, Speculation
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.training.engine.device import EngineDevice
from april_rl.training.engine.tensor_parallel import parallel_args

_NGRAM_TOKENS = (1, 4)  # shortest and longest n-gram to look up
_GUESSED_TOKENS = 4  # tokens guessed at a time


def engine_args(
    config: EngineConfig,
    device: EngineDevice,
    *,
    model_path: str,
    seed: int,
    max_model_len: int,
    max_num_seqs: int,
    lora: LoraConfig | None = None,
    reports_experts: bool = False,
) -> EngineArgs:
    """Return arguments that keep the distribution of samples and their log-probabilities."""
    assert config.dtype is not ComputeDtype.auto, "vLLM would take the checkpoint's dtype"
    assert isinstance(config.async_scheduling, bool), "vLLM would choose"
    return EngineArgs(
        model=model_path,
        seed=seed,
        dtype=config.dtype.value,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(config.max_batched_tokens, max_num_seqs),
        enable_prefix_caching=config.prefix_caching,
        kv_cache_dtype=config.kv_cache_dtype.value,
        watermark=config.kv_cache_headroom,
        async_scheduling=config.async_scheduling,
        speculative_config=speculative_config(config),
        skip_tokenizer_init=True,
        language_model_only=True,  # of a multimodal model, load only the language model
        logprobs_mode="processed_logprobs",  # log-probabilities after the temperature is applied
        enable_return_routed_experts=reports_experts,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **_lora_args(lora),
        **parallel_args(config.tensor_parallel_size),
        **device.engine_args(),
    )


def _lora_args(lora: LoraConfig | None) -> dict[str, Any]:
    """Return arguments for LoRA layers that hold one adapter; none without `lora`."""
    if lora is None:
        return {}
    targets = lora.target_modules
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(size for size in get_args(MaxLoRARanks) if size >= lora.rank),
        "lora_target_modules": targets and [name.rpartition(".")[2] for name in targets],
    }


def speculative_config(config: EngineConfig) -> dict[str, Any] | None:
    """Return the settings for guessing tokens ahead; None if vLLM does not guess.

    Guessed tokens are accepted or replaced by rejection sampling (Leviathan et al. 2023, theorem
    3.5), so that every token has the distribution of the model, and its log-probability is taken
    from the model's own logits at the sampling temperature.
    """
    if config.speculation is Speculation.none:
        return None
    shortest, longest = _NGRAM_TOKENS
    return {
        "method": config.speculation.value,
        "num_speculative_tokens": _GUESSED_TOKENS,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
        "rejection_sample_method": "standard",
    }
