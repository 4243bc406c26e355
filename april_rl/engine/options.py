"""Options of vLLM that leave the distribution of samples and their log-probabilities as they are,
but for the precision of the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

KvCacheDtypeName = Literal["auto", "fp8_e4m3", "fp8_e5m2"]
SpeculationName = Literal["none", "ngram"]

_NGRAM_TOKENS = (1, 4)  # fewest and most tokens that are looked for in what is there


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The settings of `engine` with these names."""

    prefix_caching: bool = True
    kv_cache_dtype: KvCacheDtypeName = "auto"
    kv_cache_headroom: float = 0.2  # share of it that waiting requests leave free
    speculation: SpeculationName = "none"
    speculative_tokens: int = 4  # guessed at a time
    async_scheduling: bool = False
    sleeps: bool = True  # an accelerator's memory is given up by `sleep`, parked samples included

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.EngineArgs`, but for sleeping, which is the device's.

        Guessed tokens are kept or replaced by rejection sampling (Leviathan et al. 2023, theorem
        3.5), so that every token has the distribution of the model, and its log-probability is
        taken from the model's own logits at the sampling temperature.
        """
        args: dict[str, Any] = {
            "enable_prefix_caching": self.prefix_caching,
            "kv_cache_dtype": self.kv_cache_dtype,
            "watermark": self.kv_cache_headroom,
            "async_scheduling": self.async_scheduling,
        }
        if self.speculation == "none":
            return args
        shortest, longest = _NGRAM_TOKENS
        return args | {
            "speculative_config": {
                "method": self.speculation,
                "num_speculative_tokens": self.speculative_tokens,
                "prompt_lookup_min": shortest,
                "prompt_lookup_max": longest,
                "rejection_sample_method": "standard",
            }
        }
