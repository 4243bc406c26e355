"""Settings of the engine: vLLM's precision, memory and parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config.checks import check_bounds, require, within
from april_rl.config.choices import ComputeDtype, KvCacheDtype, Sleep, Speculation


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """The inference side: vLLM."""

    dtype: ComputeDtype = ComputeDtype.auto
    # limit of prompt and response tokens; 0: data.max_prompt_tokens + rollout.max_response_tokens
    max_model_len: int = within(">= 0", 0)
    # requests that one engine computes together; 0: as many as it has slots
    max_num_seqs: int = within(">= 0", 0)
    max_batched_tokens: int = within(">= 1", 8192)  # tokens of one engine step
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
    # samples of a group share their prompt's KV cache; set it to false if layers carry a state
    prefix_caching: bool = True
    # auto: the precision of engine.dtype; fp8 holds twice the tokens, but samples from another
    # distribution than the learner's, so algorithm.correction or algorithm.ratio=behaviour has to
    # correct for it; mismatch/ shows the difference, learner.max_mismatch may have to be higher
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.auto
    # share of the KV cache that waiting samples leave to running ones, which grow into it; when the
    # cache is full, vLLM discards a running sample's keys and values and recomputes them later
    kv_cache_headroom: float = within("in [0, 1)", 0.2)
    # guess tokens ahead and keep the ones that the model would have sampled: same distribution
    speculation: Speculation = Speculation.none
    # schedule an engine step while the previous one runs, so that a GPU does not wait for
    # Python; the samples are the same. auto: on GPUs, without speculation; on CPU it costs time
    async_scheduling: bool | str = "auto"

    def __post_init__(self) -> None:
        check_bounds("engine", self)
        require(
            self.async_scheduling in (True, False, "auto"),
            f"engine.async_scheduling must be true, false or auto, got {self.async_scheduling}",
        )
        require(
            self.async_scheduling is not True or self.speculation is Speculation.none,
            "engine.async_scheduling=true does not work with engine.speculation="
            f"{self.speculation.value}, which guesses from tokens that are not sampled yet",
        )
