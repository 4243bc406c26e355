"""The memory of a worker in each phase of a step, computed before anything is loaded.

Legend: P parameters of the model, N workers that share one copy of the weights, c bytes per number
in the forward and backward pass. All sizes are bytes per worker; tables are in GiB. They count
tensors, and the memory that NCCL and CUDA graphs take in addition. A worker's CUDA context is not
in the plan: it is there when the worker measures the free memory of its GPU. The check has a
reserve for kernels that are loaded later and for what the allocator cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from april_rl.config.choices import Offload
from april_rl.start.planning.memory_inputs import Beside, MemoryInputs
from april_rl.training.learner.model.sizes import (
    BLOCK_BYTES,
    CPU_BLOCK_BYTES,
    MIN_BLOCK_ROWS,
    SHARD_BYTES,
    ModelSizes,
    recomputed_layers,
)

GIB = 1 << 30
_MASTER, _GRADIENT, _MOMENTS = 4, 4, 8  # bytes of a trained parameter, all float32
CHECKPOINT_BYTES = _MASTER + _MOMENTS  # bytes of a trained parameter in a checkpoint
_COPIES_IN_SYNC = 3  # copies of the largest tensor: cast, gathered, and in the engine's form
# FlashAttention-2's backward pass of a layer: float32 gradients of the queries, and a key's and a
# value's for each query head; 8 bytes where its output has 2.
_ATTENTION_BACKWARD = 4
_LOGIT_BLOCKS = 3  # blocks at the peak: logits, their exponentials, and a product of both
# Published by users, not measured here.
_NCCL_BYTES = GIB  # buffers of a group of ranks (vllm-project/vllm#51485, four ranks)
_STEP_BYTES = GIB  # activations and logits of an engine step, an estimate
ENGINE_ITEMS = ("engine weights", "KV cache and workspace")  # items of an engine that is awake


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a step, and the bytes of everything in memory at its peak."""

    name: str
    items: dict[str, float]

    @property
    def total(self) -> float:
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
        """Return a table: a row for each item large enough to show, a column for each phase."""
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
    model: ModelSizes, inputs: MemoryInputs, *, device_bytes: float = 0.0
) -> MemoryPlan:
    """Return the plan for a model; `device_bytes` is the total memory of a GPU."""
    share = 0.0 if inputs.is_on_cpu else inputs.gpu_share * device_bytes
    sizes = _Sizes(model, inputs, share=share)
    if inputs.is_on_cpu:
        nothing = Phase(name="host", items={})
        return MemoryPlan(phases=(sizes.on_cpu(),), host=nothing, file_bytes=sizes.file())
    return MemoryPlan(
        phases=(
            sizes.rollout(),
            *sizes.teacher(),
            sizes.backward(),
            *sizes.critic(),
            sizes.optimizer_step(),
            sizes.weight_sync(),
        ),
        host=sizes.host(),
        file_bytes=sizes.file(),
    )


def bytes_kept_asleep(inputs: MemoryInputs) -> float:
    """Return the bytes of CUDA graphs and of NCCL's buffers, as far as sleep does not free them."""
    freed, (graphs, nccl) = inputs.engine.args, _graphs_and_nccl(inputs)
    graphs = 0.0 if freed.get("sleep_mode_offload_cudagraph") else graphs
    return graphs + (0.0 if freed.get("enable_nccl_comm_suspend") else nccl)


def _graphs_and_nccl(inputs: MemoryInputs) -> tuple[float, float]:
    graphs = inputs.graph_bytes if inputs.engine.cuda_graphs else 0.0
    return graphs, _NCCL_BYTES if inputs.layout.tensor_parallel_size > 1 else 0.0


def engine_workspace(inputs: MemoryInputs) -> float:
    """Return the bytes of an engine's share that are neither weights nor KV cache."""
    return sum(_graphs_and_nccl(inputs)) + _STEP_BYTES


def engine_weights(model: ModelSizes, inputs: MemoryInputs) -> float:
    """Return the bytes of weights on each worker of an engine."""
    return model.num_parameters * inputs.engine_bytes / inputs.layout.tensor_parallel_size


class _Sizes:
    """The sizes from which the phases are computed."""

    def __init__(self, model: ModelSizes, inputs: MemoryInputs, *, share: float) -> None:
        """`share`: bytes of the device for vLLM."""
        self._model, self._inputs, self._share = model, inputs, share
        self._frozen = model.num_parameters if model.has_adapters else 0
        self._critic: _Sizes | None = None
        critic = inputs.beside.critic
        if critic is not None:
            alone = replace(inputs, has_reference=False, beside=Beside())
            self._critic = _Sizes(critic, alone, share=share)

    def rollout(self) -> Phase:
        """Return the rollout; vLLM takes its share of the whole device, used or not."""
        has_weights = self._inputs.learner.offload is not Offload.all
        items = {
            "master weights": self._masters() if has_weights else 0.0,
            "optimizer state": self._moments_that_stay(),
            **self._beside(has_weights=has_weights),
            **self._awake(),
        }
        return self._phase("rollout", items)

    def teacher(self) -> Iterator[Phase]:
        """Yield the forward passes of a teacher, whose weights are on the device only then."""
        teacher = self._inputs.beside.teacher
        if teacher is None:
            return
        some = teacher.root_parameters + 2 * teacher.layer_parameters
        numbers = self._inputs.learner.max_tokens * teacher.layer_bytes / 2
        items = {
            "master weights": self._masters(),
            "optimizer state": self._moments_that_stay(),
            **self._beside(),
            "teacher": self._teacher(),
            "gathered layers": self._inputs.compute_bytes * some,
            "a layer's activations": self._inputs.compute_bytes * numbers,
            "logits": self._logits(),
            **self._resting(),
        }
        yield self._phase("teacher", items)

    def backward(self) -> Phase:
        """Return the forward and backward pass, with the engine beside it."""
        return self._phase("backward", {**self._passes(), **self._beside(), **self._resting()})

    def critic(self) -> Iterator[Phase]:
        """Yield the critic's forward and backward pass, with the policy beside it."""
        if self._critic is not None:
            policy = self._masters() + self._moments_that_stay()
            items = {**self._critic._passes(), "policy": policy, **self._resting()}
            yield self._phase("critic", items)

    def optimizer_step(self) -> Phase:
        """Return the optimizer step: no activations, but everything else of each parameter.
        Offloaded optimizer state is on the device for one FSDP unit at a time.
        """
        stays = self._inputs.learner.offload is Offload.none
        unit = _MOMENTS * self._model.largest_unit / self._inputs.shard_size
        items = {
            "master weights": self._masters(),
            "optimizer state": self._moments() if stays else unit,
            "gradients": self._gradients(),
            **self._beside(),
            **self._resting(),
        }
        return self._phase("optimizer", items)

    def weight_sync(self) -> Phase:
        """Return the weight sync: the KV cache may still sleep, and offloaded state has left."""
        items = {
            "master weights": self._masters(),
            "optimizer state": self._moments_that_stay(),
            "engine weights": engine_weights(self._model, self._inputs),
            "weight-sync buffer": self._sync_buffer(),
            **self._beside(),
            **self._resting(),
        }
        return self._phase("weight sync", items)

    def host(self) -> Phase:
        """Return the host memory. Memory for offloaded tensors is never freed; it also holds the
        reference model between updates, and a copy of a checkpoint while that is written.
        """
        offload = self._inputs.learner.offload
        return Phase(
            name="host",
            items={
                "master weights": self._masters() if offload is Offload.all else 0.0,
                "optimizer state": 0.0 if offload is Offload.none else self._moments(),
                "reference": self._reference(),
                "teacher": self._teacher(),
                "critic": self._critic.host().total if self._critic else 0.0,
                "checkpoint": self._checkpoint(),
            },
        )

    def file(self) -> float:
        """Return the largest file of an export, to which tensors are added until it is full."""
        c = self._inputs.compute_bytes
        largest = max(SHARD_BYTES, c * self._model.largest_tensor)
        return min(largest, c * self._model.num_parameters)

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
                "teacher": self._teacher(),
                **self._beside(),
                "gradients of the critic": self._critic._gradients() if self._critic else 0.0,
                "engine weights": engine_weights(self._model, self._inputs),
                "KV cache": self._inputs.engine.kv_cache_gib * GIB,
                "checkpoint": self._checkpoint()
                + (self._critic._checkpoint() if self._critic else 0.0),
            },
        )

    def _phase(self, name: str, items: dict[str, float]) -> Phase:
        """Return a phase with buffers of the learner's collectives, which stay after an update."""
        buffers = _NCCL_BYTES if self._inputs.layout.num_workers > 1 else 0.0
        return Phase(name=name, items={**items, "NCCL of the learner": buffers})

    def _beside(self, *, has_weights: bool = True) -> dict[str, float]:
        """Return the critic's weights and optimizer state while it computes nothing."""
        critic = self._critic
        if critic is None:
            return {}
        weights = critic._masters() if has_weights else 0.0
        return {"critic": weights + critic._moments_that_stay()}

    def _passes(self) -> dict[str, float]:
        """Return the learner's items at the peak of a pass; offloaded optimizer state is there
        during optimizer steps only.

        The gradient of a unit is first whole, then copied into float32 to be reduced; the gradient
        of the root unit stays whole until the pass ends. So the peak is in the output layer, in the
        last layer (the first to be reduced), or in the embedding, when no activation is left.
        """
        model, activations = self._model, self._activations()
        whole = 0 if self._frozen else self._inputs.compute_bytes
        reduced = 0 if self._frozen else whole + _GRADIENT
        in_root = whole * model.root_parameters
        own = reduced * model.embedding_unit
        gradients, activations, logits = max(
            (in_root, activations, self._logits()),
            (in_root + reduced * model.layer_parameters, activations, 0.0),
            (max(in_root + own, reduced * model.root_parameters), 0.0, 0.0),
            key=sum,
        )
        return {
            "master weights": self._masters(),
            "optimizer state": self._moments_that_stay(),
            "gradients": self._gradients(),
            "gathered layers": self._gathered_layers() + gradients,
            "activations": activations,
            "logits": logits,
        }

    def _awake(self) -> dict[str, float]:
        """Return the engine's share; vLLM leaves room for CUDA graphs and NCCL inside it."""
        weights = engine_weights(self._model, self._inputs)
        cache = max(0.0, self._share - weights)
        return dict(zip(ENGINE_ITEMS, (weights, cache), strict=True))

    def _resting(self) -> dict[str, float]:
        """Return the engine's items while it computes nothing. A sleeping engine has freed its
        weights and KV cache, but keeps CUDA graphs and NCCL's buffers (`bytes_kept_asleep`).
        """
        if not self._inputs.engine_sleeps:
            return self._awake()
        return {"kept by a sleeping engine": bytes_kept_asleep(self._inputs)}

    def _masters(self) -> float:
        """Return the trained weights in float32, and frozen ones in the compute dtype."""
        whole = _MASTER * self._model.num_trained + self._inputs.compute_bytes * self._frozen
        return whole / self._inputs.shard_size

    def _moments(self) -> float:
        return _MOMENTS * self._model.num_trained / self._inputs.shard_size

    def _moments_that_stay(self) -> float:
        """Return the optimizer state that is always on the device; 0 if it is offloaded."""
        return self._moments() if self._inputs.learner.offload is Offload.none else 0.0

    def _checkpoint(self) -> float:
        """Return the copy that is written, which includes a reference that moves."""
        moving = self._reference() if self._inputs.moves_reference else 0.0
        return CHECKPOINT_BYTES * self._model.num_trained / self._inputs.shard_size + moving

    def _gradients(self) -> float:
        return _GRADIENT * self._model.num_trained / self._inputs.shard_size

    def _gathered_layers(self) -> float:
        """Return the weights that FSDP gathers. The root unit stays gathered; of the layers, the
        current one and the next are gathered, or all of them on CPU when a rank has a whole copy.
        """
        model = self._model
        is_kept = self._inputs.is_on_cpu and self._inputs.shard_size == 1
        some = model.root_parameters + 2 * model.layer_parameters
        return self._inputs.compute_bytes * (model.num_parameters if is_kept else some)

    def _activations(self) -> float:
        """Return what autograd keeps: for a layer that is computed again, only its input, and the
        output of its attention if the settings ask for it. Float32 takes at most twice as much as
        bfloat16, because norms do not double.
        """
        model, share = self._model, self._inputs.recomputed_share
        num_again = len(recomputed_layers(share, num_layers=model.num_layers))
        attention = model.attention_bytes if self._inputs.keeps_attention else 0.0
        saved = model.activation_bytes - model.checkpointed_bytes - attention
        each = model.activation_bytes - saved * num_again / model.num_layers
        if num_again > model.num_layers / 2:  # the last layer is computed again, too
            each += model.layer_bytes
        if not self._inputs.is_on_cpu:
            each += _ATTENTION_BACKWARD * model.attention_bytes / model.num_layers
        return self._inputs.learner.max_tokens * each * self._inputs.compute_bytes / 2

    def _logits(self) -> float:
        """Return a block of logits, and the float32 gradient of the hidden states."""
        tokens = self._inputs.learner.max_tokens
        suited = CPU_BLOCK_BYTES if self._inputs.is_on_cpu else BLOCK_BYTES
        block = max(suited, 4 * tokens * MIN_BLOCK_ROWS)
        return _LOGIT_BLOCKS * block + 4 * tokens * self._model.hidden_size

    def _sync_buffer(self) -> float:
        """Return the buffer of a weight sync, which gathers parameters one at a time."""
        return _COPIES_IN_SYNC * self._inputs.compute_bytes * self._model.largest_tensor

    def _reference(self) -> float:
        """Return the reference model; with adapters the frozen model is the reference."""
        if self._frozen or not self._inputs.has_reference:
            return 0.0
        return self._inputs.compute_bytes * self._model.num_parameters / self._inputs.shard_size

    def _teacher(self) -> float:
        teacher = self._inputs.beside.teacher
        num_parameters = teacher.num_parameters if teacher is not None else 0
        return self._inputs.compute_bytes * num_parameters / self._inputs.shard_size


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else "-"
