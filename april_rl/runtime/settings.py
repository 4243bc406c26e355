"""What a worker is built from, as plain values that travel to its process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The arguments of `learner.Learner`, but for the device."""

    model_path: str
    compute_dtype: str  # of the forward and backward pass
    activation_checkpointing: bool
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
    clip_low: float
    clip_high: float
    tis_cap: float | None
    ratio: str
    max_mismatch: float  # nats


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """A worker: a learner shard and an engine in one process."""

    device: str  # cpu or cuda (ROCm's torch calls its devices cuda too)
    threads: int
    learner: LearnerSettings
    engine: EngineSettings
