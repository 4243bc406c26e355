"""The policy as an FSDP2 model: a Hugging Face backbone and an output layer of log-probabilities.

Its parameters have the names of the Hugging Face model, so that a checkpoint, an engine and this
module speak of the same tensors. Masters are float32; compute has its own precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from april_rl.config.lora import LoraConfig
from april_rl.learner.architecture import (
    UnsupportedModelError,
    empty_model,
    logit_shape,
    recompute_activations,
)
from april_rl.learner.checkpoint import Checkpoint
from april_rl.learner.logprobs import LogprobHead
from april_rl.learner.lora import base_parameters, initialise, inject, merged_parameters
from april_rl.learner.names import Part, StoredNames, cut
from april_rl.learner.row import PackedRow

TIED_HEAD = "lm_head.weight"


class Policy(nn.Module):
    """From a packed row to the log-probability and the entropy of its response tokens.

    The attributes are called `model` and `lm_head` because Hugging Face models call them so, and
    parameter names follow; a model that has other names fails the check against its checkpoint.

    The router of a mixture of experts is trained by the loss alone, as everything else: there is no
    auxiliary loss that balances experts.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float) -> None:
        """Takes the parts of `causal_lm`; tied parameters stay one parameter."""
        super().__init__()
        embedding: nn.Module = causal_lm.get_input_embeddings()
        head: nn.Module = causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.model_type: str = causal_lm.config.model_type
        self.is_tied: bool = causal_lm.config.tie_word_embeddings
        self.model = causal_lm.base_model
        weight = (embedding if self.is_tied else head).get_parameter("weight")
        self.lm_head = LogprobHead(weight, temperature=temperature, shape=logit_shape(causal_lm))
        kinds = causal_lm._no_split_modules or ()
        self._layers = [m for m in causal_lm.modules() if type(m).__name__ in kinds]
        self._stored_names = StoredNames(causal_lm)
        self._embedding = (embedding,)  # in a tuple: registered once, as a part of the backbone

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N], with gradient, and entropy [N], without; nats, float32.

        Without a cache: nothing is generated, and with one transformers may take the row for a
        single sequence, in which every sample sees the ones before it.
        """
        hidden = self.model(
            input_ids=row.token_ids,
            position_ids=row.position_ids,
            use_cache=False,
            packing=row.packing,
        ).last_hidden_state
        # hidden[0, positions] is the same with a backward pass several times slower, on CPU.
        chosen = hidden[0].index_select(0, row.positions)
        logprobs, entropy = self.lm_head(chosen, row.labels)
        return logprobs, entropy

    def shard(self, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> None:
        """Make it an FSDP2 model: a unit a layer, one for an untied embedding, one for the rest.

        The embedding of a tied model is in the root's unit with the output layer: a parameter has
        one owner. The root stays gathered after its forward pass, for it is the first needed again.
        On CPU a rank with a whole copy keeps every unit so until a minibatch's last backward pass:
        of a tiny model, a few per cent of an update would go into casting its layers anew.
        Inputs are not cast: hidden states have the precision of the gathered embedding.
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
        """Say whether the next backward pass is a minibatch's last.

        Every pass leaves each rank its shard of the gradients; without that, FSDP2 would add up
        whole ones, in float32, until the last. Copies of the weights sum theirs in the last. A rank
        that holds a whole copy has nothing to share out, and does all of it in the last.
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
        """Give the shards memory and this rank's slices of the checkpoint.

        Buffers are computed, not stored (rope frequencies): they are kept over `to_empty`, which
        would leave them undefined.
        """
        buffers = dict(self.named_buffers())
        self.to_empty(device=device)
        for name, empty in self.named_buffers():
            empty.copy_(buffers[name])
        checkpoint.load_into(self.stored())

    def stored(self) -> Iterator[tuple[Part, nn.Parameter]]:
        """Each tensor of a checkpoint of this model, with the parameter that it is a part of."""
        for name, parameter in base_parameters(self):
            for part in self._stored_names.parts(name, parameter.shape):
                yield part, parameter

    def gathered(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each part of `stored`, in its order, on every rank.

        A collective: all ranks iterate to the end together. Parameters are gathered one at a time,
        cast to `dtype` before, and no tensor is a master itself; the experts of a layer are views
        of one. A tied output layer comes once, as the embedding; adapters come merged into what
        they adapt.
        """
        self.reshard_all()
        for name, parameter in merged_parameters(self):
            parts = self._stored_names.parts(name, parameter.shape)
            shard = cast(DTensor, parameter.to(dtype, copy=True))
            yield from cut(shard.full_tensor(), parts)

    def trained(self) -> list[nn.Parameter]:
        """What the optimizer moves: the adapters where there are some, else every parameter."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def reshard_all(self) -> None:
        """Put the masters back where a forward pass left gathered, cast tensors in their place."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_policy(
    folder: Path,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool,
    temperature: float,
    storage_dtype: torch.dtype = torch.float32,
    lora: LoraConfig | None = None,
    lora_seed: int = 0,
) -> Policy:
    """The sharded policy with the weights of a Hugging Face folder, ready for its optimizer.

    `storage_dtype` is that of the shards: masters are float32. With `lora` those are the adapters,
    and the frozen model may be stored in the precision it is computed with; `lora_seed` is that of
    their first values.
    Raises UnsupportedModelError, before anything is loaded, when the learner would compute
    something else than the model, CheckpointError or UnknownLayoutError when the folder does not
    describe a model the learner can hold, and LoraError when it has no such layers as `lora` names.
    """
    causal_lm = empty_model(AutoConfig.from_pretrained(folder), dtype=storage_dtype)
    if activation_checkpointing:
        _check_checkpointing(causal_lm)
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(causal_lm, temperature=temperature)
    checkpoint = Checkpoint(folder)
    names = [part.name for part, _ in policy.stored()]
    checkpoint.check_names(names, optional=[TIED_HEAD] if policy.is_tied else [])
    if lora is not None:
        inject(causal_lm, lora)
    policy.shard(mesh, compute_dtype=compute_dtype)
    policy.materialise(checkpoint, device=device)
    if lora is not None:
        initialise(policy, seed=lora_seed)
    policy.eval()
    if activation_checkpointing:
        recompute_activations(policy)
    return policy


def _check_checkpointing(causal_lm: PreTrainedModel) -> None:
    """Raise UnsupportedModelError when the model cannot compute its activations anew."""
    if not causal_lm.supports_gradient_checkpointing:
        raise UnsupportedModelError(
            f"learner.activation_checkpointing=true: model_type {causal_lm.config.model_type} does "
            "not support it; set it to false"
        )
