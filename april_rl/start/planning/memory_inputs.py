"""The inputs of the memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.choices import ComputeDtype, Kl, KvCacheDtype, Resume, Sleep
from april_rl.config.consistency import longest_sequence
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.config.schema import LearnerConfig
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.runtime.layout import Layout

_BYTES = {ComputeDtype.bfloat16: 2, ComputeDtype.float32: 4}


class Beside(NamedTuple):
    """The models beside the policy that have sizes of their own."""

    teacher: ModelSizes | None = None
    critic: ModelSizes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInputs:
    """Inputs of the memory plan other than the model: sections of the configuration as the run will
    have them, and facts that follow from other sections.
    """

    layout: Layout
    learner: LearnerConfig
    lora: LoraConfig
    engine: EngineConfig
    has_reference: bool  # a frozen copy of the policy
    moves_reference: bool = False  # whether the policy replaces it during the run
    beside: Beside
    longest_tokens: int  # longest sample: learner.max_tokens cannot be less
    keeps_parked: bool  # rollout.resume=keep: engines must not sleep; with auto they may
    # CUDA graphs, which a sleeping engine keeps: as published (vllm-project/vllm#47654)
    graph_bytes: float = 1.5e9

    @property
    def is_on_cpu(self) -> bool:
        """Return whether learner and engine share the host's memory."""
        return self.layout.device == "cpu"

    @property
    def shard_size(self) -> int:
        """Workers that share one copy of the weights."""
        return self.learner.shard_size or self.layout.num_workers

    @property
    def recomputed_share(self) -> float:
        """Share of layers that compute activations twice; all with auto, until it is decided."""
        is_open = isinstance(self.learner.activation_checkpointing, str)
        return 1.0 if is_open else self.learner.recomputed_share

    @property
    def keeps_attention(self) -> bool:
        """Whether layers computed twice keep their attention; with auto only once decided."""
        return self.learner.keep_attention is True

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the forward and backward pass."""
        return _BYTES[self.learner.compute_dtype]

    @property
    def engine_bytes(self) -> int:
        """Bytes of a number of the engine's weights."""
        return _BYTES[self.engine.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of a number in the KV cache."""
        return self.engine_bytes if self.engine.kv_cache_dtype is KvCacheDtype.auto else 1

    @property
    def gpu_share(self) -> float:
        """The engine's share of a GPU; auto has to be decided before."""
        share = self.engine.gpu_memory_utilization
        assert not isinstance(share, str), "engine.gpu_memory_utilization=auto is not decided"
        return share

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine gives up its memory in updates; with auto it does, until decided."""
        return not self.is_on_cpu and self.engine.sleep is not Sleep.never


class Decision(NamedTuple):
    """Inputs after a decision about an auto, with its reason for the user, empty if it was set."""

    inputs: MemoryInputs
    reason: str


def memory_inputs(config: TrainConfig, layout: Layout, beside: Beside) -> MemoryInputs:
    """Return what a settled configuration and the models beside the policy say about memory."""
    return MemoryInputs(
        layout=layout,
        learner=config.learner,
        lora=config.lora,
        engine=config.engine,
        has_reference=config.algorithm.kl is not Kl.none,
        moves_reference=config.algorithm.reference_every is not None,
        beside=beside,
        longest_tokens=longest_sequence(config)[0],
        keeps_parked=config.rollout.resume is Resume.keep,
    )
