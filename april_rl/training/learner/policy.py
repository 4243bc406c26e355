"""The policy as an FSDP2 model: a Hugging Face backbone and an output layer of log-probabilities.

Parameters have the names of the Hugging Face model, so that a checkpoint, an engine and the learner
mean the same tensors. Master weights are float32; computation has its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from april_rl.config.lora import LoraConfig
from april_rl.training.learner.mesh import Site
from april_rl.training.learner.model.architecture import (
    UnsupportedModelError,
    check_device,
    empty_model,
    frozen_tensors,
    layers_of,
    logit_shape,
    recompute_activations,
)
from april_rl.training.learner.model.attention import KEEP_OUTPUT
from april_rl.training.learner.model.checkpoint import Checkpoint
from april_rl.training.learner.model.fused import check_compiler, fuse
from april_rl.training.learner.model.logprobs import LogprobHead
from april_rl.training.learner.model.lora import (
    base_parameters,
    initialise,
    inject,
    merged_parameters,
)
from april_rl.training.learner.model.names import (
    Part,
    StoredNames,
    TextPrefixes,
    cut,
    untrained_names,
)
from april_rl.training.learner.row import PackedRow


class Policy(nn.Module):
    """Maps a packed row to the log-probability and the entropy of its response tokens.

    The attributes `model` and `lm_head` have the names that Hugging Face models use, because
    parameter names follow from them. A model with other names fails the check against its
    checkpoint.

    The router of a mixture-of-experts model is trained by the loss alone: there is no auxiliary
    loss that balances the experts.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        temperature: float,
        prefixes: TextPrefixes = TextPrefixes(),  # noqa: B008 -- immutable
    ) -> None:
        """Take over the parts of `causal_lm`; tied parameters stay one parameter. `prefixes` are
        the prefixes of its checkpoint.
        """
        super().__init__()
        embedding: nn.Module = causal_lm.get_input_embeddings()
        head: nn.Linear = causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.model_type: str = causal_lm.config.model_type
        self.is_tied: bool = causal_lm.config.tie_word_embeddings
        self.model = causal_lm.base_model
        # Where vLLM uses transformers' own code for a model, it changes the class in this process:
        # a call then looks for this attribute, and compiles unless it is true.
        vars(self.model)["do_not_compile"] = True
        weight = (embedding if self.is_tied else head).get_parameter("weight")
        self.lm_head = LogprobHead(
            weight,
            bias=head.bias,
            temperature=temperature,
            shape=logit_shape(causal_lm),
        )
        self._layers = layers_of(causal_lm)
        self._stored_names = StoredNames(causal_lm, prefixes)
        self.untouched: list[str] = []  # checkpoint tensors of other models
        self._frozen = frozen_tensors(causal_lm)
        self._embedding = (embedding,)  # a tuple, so that torch registers it in the backbone only

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N], with gradient, and entropy [N], without; nats, float32."""
        logprobs, entropy = self.lm_head(self.hidden_states(row), row.labels)
        return logprobs, entropy

    def hidden_states(self, row: PackedRow) -> Tensor:
        """Return the last hidden state [N, H] at the positions that predict a response token.

        `use_cache` must be off: with a cache, transformers may take the row for a single sequence,
        in which every sample sees the ones before it.
        """
        states: Tensor = self.model(
            input_ids=row.token_ids,
            position_ids=row.position_ids,
            use_cache=False,
            packing=row.packing,
        ).last_hidden_state
        # states[0, positions] gives the same, but its backward pass is several times slower on CPU.
        return states[0].index_select(0, row.positions)

    def fuse(self) -> None:
        """Compile what is computed on every token (`model.fused`)."""
        fuse(self.model)
        self.lm_head.fuse()

    def unread(self, prefixes: TextPrefixes) -> list[str]:
        """Return the names of the output layer's tensors that a checkpoint may have without being
        read.
        """
        return [f"{prefixes.lm_head}weight"] if self.is_tied else []

    @classmethod
    def build(
        cls,
        folder: Path,
        site: Site,
        *,
        activation_checkpointing: float,
        keep_attention: bool = False,
        temperature: float,
        storage_dtype: torch.dtype = torch.float32,
        lora: LoraConfig | None = None,
        lora_seed: int = 0,
    ) -> Self:
        """Return the sharded model with the weights of a Hugging Face folder, ready for its
        optimizer.

        `storage_dtype` is the dtype of the shards, float32 for master weights. With `lora` the
        adapters are the master weights, and the frozen model may be stored in the compute dtype;
        `lora_seed` initialises the adapters. `activation_checkpointing` is the share of the layers
        that compute their activations again in the backward pass; with `keep_attention` they keep
        the output of their attention. On a fused site some functions are compiled (`model.fused`).

        Raises UnsupportedModelError, before loading anything, when the learner would compute
        something other than the model; ModelFolderError or UnknownLayoutError when the folder does
        not match a model that the learner can hold; and LoraError when the model lacks the layers
        that `lora` names. Raises CompilerError on a fused site where torch cannot compile.
        """
        if site.is_fused:
            check_compiler(site.device)
        causal_lm = empty_model(AutoConfig.from_pretrained(folder), dtype=storage_dtype)
        check_device(causal_lm, site.device)
        if activation_checkpointing:
            _check_checkpointing(causal_lm)
            causal_lm.gradient_checkpointing_enable(
                {"use_reentrant": False} | (KEEP_OUTPUT if keep_attention else {})
            )
        checkpoint = Checkpoint(folder)
        prefixes = checkpoint.prefixes
        policy = cls(causal_lm, temperature=temperature, prefixes=prefixes)
        policy.untouched = checkpoint.find_untouched(
            [part.name for part, _ in policy.stored_tensors()],
            optional=policy.unread(prefixes),
            ignored=untrained_names(causal_lm, prefixes),
        )
        policy._check_tied(checkpoint, prefixes)
        if lora is not None:
            inject(causal_lm, lora)
        policy.shard(site.mesh, compute_dtype=site.compute_dtype)
        policy.materialise(checkpoint, device=site.device)
        if lora is not None:
            initialise(policy, seed=lora_seed)
        if site.is_fused:
            policy.fuse()
        policy.eval()
        if activation_checkpointing:
            recompute_activations(policy, share=activation_checkpointing)
        site.watch(policy)
        return policy

    def _check_tied(self, checkpoint: Checkpoint, prefixes: TextPrefixes) -> None:
        if self.is_tied:
            tied = self.lm_head.get_parameter("weight")
            names = (part.name for part, tensor in self.stored_tensors() if tensor is tied)
            checkpoint.check_tied(next(names), *self.unread(prefixes))

    def shard(self, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> None:
        """Turn the policy into an FSDP2 model with a unit per layer and a root unit for the rest.

        An untied embedding has its own unit. A tied embedding is in the root unit with the output
        layer, because a parameter belongs to one unit. The root stays gathered after its forward
        pass, because the backward pass needs it first. On CPU, a rank with a whole copy keeps every
        unit gathered until a minibatch's last backward pass: for a tiny model, casting its layers
        again would cost a few per cent of an update. Inputs are not cast: hidden states have the
        dtype of the gathered embedding.
        """
        self._has_whole_copy = mesh.shape[-1] == 1
        self._stays_gathered = self._has_whole_copy and mesh.device_type == "cpu"
        precision = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for unit in self._layers if self.is_tied else (*self._layers, self._embedding[0]):
            is_given_up = not self._stays_gathered
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=is_given_up)
        fully_shard(self, mesh=mesh, mp_policy=precision)

    def set_last_backward(self, is_last: bool) -> None:
        """Set whether the next backward pass is a minibatch's last.

        Every backward pass reduces gradients to each rank's shard; otherwise FSDP2 would accumulate
        whole float32 gradients until the last pass. Copies of the weights sum their gradients in
        the last pass. A rank that holds a whole copy has nothing to scatter and reduces only in the
        last pass.
        """
        fsdp = cast(FSDPModule, self)
        if self._has_whole_copy:
            fsdp.set_requires_gradient_sync(is_last)
        else:
            fsdp.set_requires_all_reduce(is_last)
        if self._stays_gathered:
            fsdp.set_reshard_after_backward(is_last)
        fsdp.set_is_last_backward(is_last)

    def materialise(self, checkpoint: Checkpoint, *, device: torch.device) -> None:
        """Allocate the shards and load this rank's slices of the checkpoint.

        Most buffers, such as rope frequencies, are computed, not stored. They are saved around
        `to_empty`, which would leave them undefined.
        """
        buffers = dict(self.named_buffers())
        self.to_empty(device=device)
        for name, empty in self.named_buffers():
            empty.copy_(buffers[name])
        checkpoint.load_into(self.stored_tensors())

    def stored_tensors(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield each tensor of a checkpoint with the tensor of this model that holds it.

        The parameters come first, then the buffers that a checkpoint has, which are not trained.
        """
        for name, tensor in (*base_parameters(self), *self._frozen_buffers()):
            for part in self._stored_names.stored_parts(name, tensor.shape):
                yield part, tensor

    def stored_bytes(self, dtype: torch.dtype) -> list[int]:
        """Return the bytes of each tensor that `gather` yields with this dtype."""
        return [
            part.shape.numel()
            * (dtype if isinstance(tensor, nn.Parameter) else tensor.dtype).itemsize
            for part, tensor in self.stored_tensors()
        ]

    def gather(self, dtype: torch.dtype, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each part of `stored_tensors`, in order, on every rank.

        A collective: all ranks iterate to the end together. Parameters are cast to `dtype` and
        gathered one at a time. A yielded tensor never shares memory with the master weights; the
        experts of a layer are views of one tensor. A tied output layer comes once, as the
        embedding, and adapters come merged into the weights they adapt, or with `merged` false not
        at all. Buffers keep their dtype:
        a router's bias rounded to bfloat16 would choose other experts.
        """
        self.reshard_all()
        of_model = merged_parameters(self) if merged else base_parameters(self)
        for name, parameter in of_model:
            parts = self._stored_names.stored_parts(name, parameter.shape)
            shard = cast(DTensor, parameter.detach().to(dtype, copy=True))
            yield from cut(shard.full_tensor(), parts)
        for name, buffer in self._frozen_buffers():
            yield from cut(buffer.clone(), self._stored_names.stored_parts(name, buffer.shape))

    def _frozen_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.get_buffer(name)) for name in self._frozen)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer updates: the adapters if any, else all."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def named_trained_parameters(self, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name, after `prefix`, and shard of every parameter that the optimizer updates."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                yield f"{prefix}{name}", parameter

    def trained_units(self) -> list[list[nn.Parameter]]:
        """Return the trained parameters in order, one list for each FSDP unit."""
        layer_of = {
            p: index for index, layer in enumerate(self._layers) for p in layer.parameters()
        }
        return [list(unit) for _, unit in groupby(self.trained_parameters(), key=layer_of.get)]

    def reshard_all(self) -> None:
        """Reshard all units: parameters become the master shards again, not gathered casts."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _check_checkpointing(causal_lm: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the model cannot recompute its activations."""
    if not causal_lm.supports_gradient_checkpointing:
        raise UnsupportedModelError(
            f"learner.activation_checkpointing: model_type {causal_lm.config.model_type} does "
            "not support it; set it to false"
        )
