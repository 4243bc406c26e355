"""What a worker is built from, as plain values that travel to its process."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config import TrainConfig
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.engine.options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The arguments of `learner.Learner` but for device, objective, adapters, signs of progress."""

    model_path: str
    compute_dtype: str  # of the forward and backward pass
    activation_checkpointing: bool
    shard_size: int  # ranks that share a copy of the weights; 0: all
    offload: str  # what leaves the learner's device while the engine generates
    temperature: float  # log-probabilities are taken at the sampling temperature
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    warmup_steps: int
    schedule: str
    num_steps: int  # optimizer steps of the whole run
    max_mismatch: float  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The arguments of `learner.Lora`."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | None  # None: every linear layer
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The arguments of `engine.VllmEngine`."""

    model_path: str
    seed: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    kv_cache_gib: float
    gpu_memory_utilization: float
    enforce_eager: bool
    temperature: float
    keep_parked: bool
    tensor_parallel_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """A worker: a learner shard and an engine in one process."""

    device: str  # cpu or cuda (ROCm's torch calls its devices cuda too)
    threads: int
    learner: LearnerSettings
    algorithm: AlgorithmConfig
    lora: LoraSettings | None  # None: the whole model is trained
    engine: EngineSettings
    options: EngineOptions


def engine_options(config: TrainConfig) -> EngineOptions:
    """vLLM's options, from a checked configuration."""
    engine = config.engine
    return EngineOptions(
        prefix_caching=engine.prefix_caching,
        kv_cache_dtype=engine.kv_cache_dtype.value,
        kv_cache_headroom=engine.kv_cache_headroom,
        speculation=engine.speculation.value,
        speculative_tokens=engine.speculative_tokens,
        async_scheduling=engine.async_scheduling,
    )
