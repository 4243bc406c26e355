"""The memory of a worker in each phase of a step, computed before anything is loaded.

Legend: P parameters of the model, N workers that share one copy of the weights, c bytes per number
in the forward and backward pass. All sizes are bytes per worker; tables are in GiB. Weights,
gradients, optimizer state and the engine's share follow from the settings; the other sizes are
marked as estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config.choices import Offload
from april_rl.learner.sizes import BLOCK_BYTES, CPU_BLOCK_BYTES, MIN_BLOCK_ROWS, SHARD_BYTES
from april_rl.memory.inputs import MemoryInputs
from april_rl.runtime.preflight import ModelFacts

GIB = 1 << 30
_MASTER, _GRADIENT, _MOMENTS = 4, 4, 8  # bytes of a trained parameter, all float32
_COPIES_IN_SYNC = 3  # of the largest tensor: cast, gathered, and in the engine's form
_LOGIT_BLOCKS = 3  # logits, their exponentials, and the 16-bit product before
# Estimates: NCCL and fragmentation; what vLLM keeps while it sleeps; its CUDA graphs.
_OVERHEAD, _ASLEEP, _GRAPHS = int(1.5 * GIB), int(0.5 * GIB), GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a step, and the bytes of everything in memory at its peak."""

    name: str
    items: dict[str, float]

    @property
    def total(self) -> float:
        """Return the bytes of all items."""
        return sum(self.items.values())

    def __str__(self) -> str:
        """List the items that are large enough to show in GiB, largest first."""
        by_size = sorted(self.items.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in by_size if size > GIB / 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The phases of a step on a worker's device, and its host memory meanwhile."""

    phases: tuple[Phase, ...]
    host: Phase
    file_bytes: float  # an export's file in the host memory of rank 0 while it is written

    def __str__(self) -> str:
        """Return a table with a row per item that is large enough to show and a column per
        phase.
        """
        columns = [phase for phase in (*self.phases, self.host) if phase.items]
        seen = ((name, size) for phase in columns for name, size in phase.items.items())
        names = list(dict.fromkeys(name for name, size in seen if size > GIB / 20))
        rows = [[name, *(_gib(phase.items.get(name, 0.0)) for phase in columns)] for name in names]
        heading = ["memory of a worker, GiB", *(phase.name for phase in columns)]
        table = [heading, *rows, ["total", *(_gib(phase.total) for phase in columns)]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            row[0].ljust(widths[0])
            + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in table
        )


def plan_memory(
    facts: ModelFacts, inputs: MemoryInputs, *, device_bytes: float = 0.0
) -> MemoryPlan:
    """Return the plan for a model; `device_bytes` is the total memory of a GPU."""
    sizes = _Sizes(facts, inputs, share=inputs.engine.gpu_memory_utilization * device_bytes)
    if inputs.is_on_cpu:
        nothing = Phase(name="host", items={})
        return MemoryPlan(phases=(sizes.on_cpu(),), host=nothing, file_bytes=sizes.file())
    return MemoryPlan(
        phases=(
            sizes.rollout(),
            sizes.backward(),
            sizes.optimizer_step(),
            sizes.weight_sync(),
        ),
        host=sizes.host(),
        file_bytes=sizes.file(),
    )


class _Sizes:
    """The sizes that phases are made of."""

    def __init__(self, facts: ModelFacts, inputs: MemoryInputs, *, share: float) -> None:
        """`share`: bytes of the device for vLLM."""
        self._facts, self._inputs, self._share = facts, inputs, share
        adapters = inputs.lora.rank * facts.num_layers * self._adapter_width()
        self._trained = adapters or facts.num_parameters
        self._frozen = facts.num_parameters if adapters else 0

    def rollout(self) -> Phase:
        """Return the rollout; vLLM takes its share of the whole device, whatever else is there."""
        away = self._inputs.learner.offload
        return Phase(
            name="rollout",
            items={
                "master weights": 0.0 if away is Offload.all else self._masters(),
                "optimizer state": 0.0 if away is not Offload.none else self._moments(),
                **self._awake(),
                "overhead": _OVERHEAD,
            },
        )

    def backward(self) -> Phase:
        """Return the forward and backward pass, with the engine beside it."""
        own = self._passes()
        return Phase(name="backward", items={**own, **self._resting(), "overhead": _OVERHEAD})

    def optimizer_step(self) -> Phase:
        """Return the optimizer step: no activations, but everything else of each parameter."""
        return Phase(
            name="optimizer",
            items={
                "master weights": self._masters(),
                "optimizer state": self._moments(),
                "gradients": self._gradients(),
                **self._resting(),
                "overhead": _OVERHEAD,
            },
        )

    def weight_sync(self) -> Phase:
        """Return the weight sync: offloaded optimizer state has left, and the engine's KV cache may
        still sleep.
        """
        is_away = self._inputs.learner.offload is not Offload.none
        return Phase(
            name="weight sync",
            items={
                "master weights": self._masters(),
                "optimizer state": 0.0 if is_away else self._moments(),
                "engine weights": self._engine_weights(),
                "weight-sync buffer": self._sync_buffer(),
                **self._resting(),
                "overhead": _OVERHEAD,
            },
        )

    def host(self) -> Phase:
        """Return the host memory. Room for offloaded tensors is kept once it is taken; the
        reference model is there between updates, and a copy of what a checkpoint holds while it is
        written.
        """
        offload = self._inputs.learner.offload
        return Phase(
            name="host",
            items={
                "master weights": self._masters() if offload is Offload.all else 0.0,
                "optimizer state": 0.0 if offload is Offload.none else self._moments(),
                "reference": self._reference(),
                "checkpoint": self._checkpoint(),
            },
        )

    def file(self) -> float:
        """Return the size of the largest file of an export: tensors are added to a file until it
        is full.
        """
        c = self._inputs.compute_bytes
        largest = max(SHARD_BYTES, c * self._facts.embedding_parameters)
        return min(largest, c * self._facts.num_parameters)

    def on_cpu(self) -> Phase:
        """Return the whole run as one phase: nothing sleeps or offloads, so that the peaks of
        learner and engine add up. A slow disk writes a checkpoint's copy during the next update.

        An export is written when gradients and activations are gone; its file takes their place.
        """
        return Phase(
            name="the run",
            items={
                **self._passes(),
                "reference": self._reference(),
                "engine weights": self._engine_weights(),
                "KV cache": self._inputs.engine.kv_cache_gib * GIB,
                "checkpoint": self._checkpoint(),
            },
        )

    def _passes(self) -> dict[str, float]:
        """Return the learner's items in a pass; offloaded optimizer state is there during optimizer
        steps only.
        """
        stays = self._inputs.learner.offload is Offload.none
        return {
            "master weights": self._masters(),
            "optimizer state": self._moments() if stays else 0.0,
            "gradients": self._gradients(),
            "gathered layers": self._gathered(),
            "activations": self._activations(),
            "logits": self._logits(),
        }

    def _awake(self) -> dict[str, float]:
        """Return the engine's share; vLLM leaves room for CUDA graphs inside it."""
        weights = self._engine_weights()
        cache = max(0.0, self._share - weights)
        return {"engine weights": weights, "KV cache and workspace": cache}

    def _resting(self) -> dict[str, float]:
        """Return the engine's items while it computes nothing."""
        if not self._inputs.engine_sleeps:
            return self._awake()
        return {"sleeping engine": _ASLEEP + (_GRAPHS if self._inputs.engine.cuda_graphs else 0)}

    def _adapter_width(self) -> int:
        """Return the rows of A plus the columns of B of all adapters in a layer, one for each
        linear.
        """
        facts = self._facts
        heads = facts.attention_size + facts.key_value_size
        return 7 * facts.hidden_size + 2 * heads + 3 * facts.mlp_size

    def _masters(self) -> float:
        """Return the trained weights in float32; weights frozen under adapters are in the precision
        of computation.
        """
        whole = _MASTER * self._trained + self._inputs.compute_bytes * self._frozen
        return whole / self._inputs.shard_size

    def _moments(self) -> float:
        return _MOMENTS * self._trained / self._inputs.shard_size

    def _checkpoint(self) -> float:
        """Return the copy that is written: trained weights in float32 and optimizer state."""
        return (_MASTER + _MOMENTS) * self._trained / self._inputs.shard_size

    def _gradients(self) -> float:
        return _GRADIENT * self._trained / self._inputs.shard_size

    def _gathered(self) -> float:
        """Return what FSDP gathers. The root unit stays gathered; of the layers there are the
        current one and the next, or all of them on CPU with a whole copy. The gradient of a unit is
        first whole, then copied into float32 to be reduced.
        """
        facts, c = self._facts, self._inputs.compute_bytes
        root, layer = facts.embedding_parameters, facts.layer_parameters
        is_kept = self._inputs.is_on_cpu and self._inputs.shard_size == 1
        num_layers = facts.num_layers if is_kept else 2
        gradient = 0 if self._frozen else (c + _GRADIENT) * max(root, layer)
        return c * (root + num_layers * layer) + gradient

    def _activations(self) -> float:
        """Estimate what autograd keeps for the layers of a Llama- or Qwen-like decoder.

        Bytes per token in one layer: the norms keep their input in float32 and the normalised input
        (hidden size H, twice), the projections their inputs, attention its queries, keys, values
        and output (and the norms of queries and keys theirs), the MLP four rows of its width. There
        is one more norm at the end. With checkpointing a layer keeps its input only, and one layer
        at a time is computed again.
        """
        facts, inputs = self._facts, self._inputs
        hidden, heads = facts.hidden_size, facts.attention_size + facts.key_value_size
        c, float32, num_layers = inputs.compute_bytes, 4, facts.num_layers
        layer = c * (4 * hidden + 3 * heads + 4 * facts.mlp_size) + float32 * (2 * hidden + heads)
        last = (c + float32) * hidden
        if inputs.learner.activation_checkpointing:
            return inputs.learner.max_tokens * (num_layers * c * hidden + layer + last)
        return inputs.learner.max_tokens * (num_layers * layer + last)

    def _logits(self) -> float:
        """Return a block of logits, and the float32 gradient of the hidden states."""
        tokens = self._inputs.learner.max_tokens
        suited = CPU_BLOCK_BYTES if self._inputs.is_on_cpu else BLOCK_BYTES
        block = max(suited, 4 * tokens * MIN_BLOCK_ROWS)
        return _LOGIT_BLOCKS * block + 4 * tokens * self._facts.hidden_size

    def _engine_weights(self) -> float:
        per_engine = self._inputs.engine_bytes * self._facts.num_parameters
        return per_engine / self._inputs.layout.tensor_parallel_size

    def _sync_buffer(self) -> float:
        """Return the buffer of a weight sync. Parameters are gathered one at a time; the largest is
        the embedding, or all experts of a layer.
        """
        facts = self._facts
        largest = max(facts.embedding_parameters, facts.expert_parameters)
        return _COPIES_IN_SYNC * self._inputs.compute_bytes * largest

    def _reference(self) -> float:
        """Return the reference model; with adapters the frozen model is the reference."""
        if self._frozen or not self._inputs.has_reference:
            return 0.0
        return self._inputs.compute_bytes * self._facts.num_parameters / self._inputs.shard_size


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else "-"
