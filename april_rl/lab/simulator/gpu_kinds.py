"""GPUs by their makers' data sheets, and the share of them that programs are assumed to reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Reached(NamedTuple):
    """Shares of a data sheet's speeds, and what an engine step takes however little it computes."""

    reading: float  # of the memory's bandwidth, while decoding
    prefill: float  # of the dense bfloat16 peak
    update: float  # of the same, counted as model FLOPs
    layer_s: float  # the kernels of a layer without experts
    between_steps_s: float  # scheduling, sampling and launches that the GPU waits for


# Assumptions, not measurements; a calibration replaces them. An H200 reached 0.17 in the update of
# 0.6 B parameters without learner.fused (docs/experiments.md).
EXPECTED = Reached(0.80, 0.50, 0.30, layer_s=20e-6, between_steps_s=0.3e-3)
SLOW = Reached(0.65, 0.35, 0.17, layer_s=50e-6, between_steps_s=1e-3)
FAST = Reached(0.90, 0.65, 0.40, layer_s=10e-6, between_steps_s=0.2e-3)
EAGER_LAYER_S = 0.6e-3  # without CUDA graphs: a step of 28 layers took 19 ms on an H200

_SYNC_BYTES_PER_S = 1e10  # gathering, sending and loading one weight after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds of a GPU with an engine and a learner."""

    read_bytes_per_s: float  # weights, keys and values that decoding reads
    prefill_flops_per_s: float  # FLOPs in the matrix products of a prefill
    update_flops_per_s: float  # model FLOPs of the learner
    sync_bytes_per_s: float  # weights that go from the learner into the engine
    link_bytes_per_s: float  # to another GPU
    layer_s: float  # seconds that a layer of an engine step takes at least
    between_steps_s: float  # seconds of an engine step in addition


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A GPU as it is sold."""

    title: str
    gib: float  # memory that a program sees
    bytes_per_s: float  # bandwidth of its memory
    flops_per_s: float  # dense bfloat16; sheets of Hopper and later print twice as much, "sparse"
    link_bytes_per_s: float  # to another GPU of the machine, one way

    def rates(self, reached: Reached = EXPECTED) -> Rates:
        """Return the speeds of programs that reach these shares of the data sheet."""
        return Rates(
            read_bytes_per_s=reached.reading * self.bytes_per_s,
            prefill_flops_per_s=reached.prefill * self.flops_per_s,
            update_flops_per_s=reached.update * self.flops_per_s,
            sync_bytes_per_s=_SYNC_BYTES_PER_S,
            link_bytes_per_s=reached.reading * self.link_bytes_per_s,
            layer_s=reached.layer_s,
            between_steps_s=reached.between_steps_s,
        )


# Sources: NVIDIA's data sheets of A100, H100, H200, L40S and DGX B200, its whitepaper of the Ada
# architecture (appendix A), and AMD's data sheet of the Instinct MI300X.
GPU_KINDS = {
    "4090": GpuKind("RTX 4090", 23.6, 1.008e12, 165.2e12, 32e9),  # PCIe 4.0
    "l40s": GpuKind("L40S", 44.4, 0.864e12, 362e12, 32e9),
    "a100": GpuKind("A100 SXM", 79.2, 2.039e12, 312e12, 300e9),
    "h100": GpuKind("H100 SXM", 79.2, 3.35e12, 989.5e12, 450e9),
    "h200": GpuKind("H200 SXM", 139.8, 4.8e12, 989.5e12, 450e9),
    "b200": GpuKind("B200", 178.0, 8.0e12, 2250e12, 900e9),
    "mi300x": GpuKind("MI300X", 191.5, 5.3e12, 1307.4e12, 64e9),  # one of seven links
}
