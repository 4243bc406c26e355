"""vLLM's arguments, from the engine's settings."""

from __future__ import annotations

from typing import Any, get_args

from vllm import EngineArgs
from vllm.config.lora import MaxLoRARanks

from april_rl.config.choices import ComputeDtype
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.training.engine.device import EngineDevice
from april_rl.training.engine.tensor_parallel import parallel_args

KV_CACHE_HEADROOM = 0.2  # share of the KV cache that waiting samples leave to running ones


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
    assert "async_scheduling" in config.args, "vLLM would choose"
    own = config.args | {"max_num_batched_tokens": max(config.max_batched_tokens, max_num_seqs)}
    return EngineArgs(
        model=model_path,
        seed=seed,
        dtype=config.dtype.value,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=config.prefix_caching,
        kv_cache_dtype=config.kv_cache_dtype.value,
        watermark=KV_CACHE_HEADROOM,
        skip_tokenizer_init=True,
        language_model_only=True,  # of a multimodal model, load only the language model
        logprobs_mode="processed_logprobs",  # log-probabilities after the temperature is applied
        enable_return_routed_experts=reports_experts,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **_lora_args(lora),
        **parallel_args(config.tensor_parallel_size),
        **device.engine_args(),
        **own,
    )


def _lora_args(lora: LoraConfig | None) -> dict[str, Any]:
    """Return arguments for LoRA layers that hold one adapter; none without `lora`."""
    if lora is None or lora.rank is None:
        return {}
    targets = lora.target_modules
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(size for size in get_args(MaxLoRARanks) if size >= lora.rank),
        "lora_target_modules": targets and [name.rpartition(".")[2] for name in targets],
    }
