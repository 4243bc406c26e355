"""The policy as an FSDP2 model: a Hugging Face backbone and an output layer of log-probabilities.

Its parameters have the names of the Hugging Face model, so that a checkpoint, an engine and this
module speak of the same tensors. Masters are float32; compute has its own precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from april_rl.learner import attention
from april_rl.learner.checkpoint import Checkpoint
from april_rl.learner.logprobs import LogprobHead
from april_rl.learner.row import PackedRow

TIED_HEAD = "lm_head.weight"


class Policy(nn.Module):
    """From a packed row to the log-probability and the entropy of its response tokens.

    The attributes are called `model` and `lm_head` because Hugging Face models call them so, and
    parameter names follow; a model that has other names fails the check against its checkpoint.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float) -> None:
        """Takes the parts of `causal_lm`; tied parameters stay one parameter."""
        super().__init__()
        embedding: nn.Module = causal_lm.get_input_embeddings()
        head: nn.Module = causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.is_tied: bool = causal_lm.config.tie_word_embeddings
        self.model = causal_lm.base_model
        weight = (embedding if self.is_tied else head).get_parameter("weight")
        self.lm_head = LogprobHead(weight, temperature=temperature)
        kinds = causal_lm._no_split_modules or ()
        self._layers = [m for m in causal_lm.modules() if type(m).__name__ in kinds]
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
        logprobs, entropy = self.lm_head(hidden[0, row.positions], row.labels)
        return logprobs, entropy

    def shard(self, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> None:
        """Make it an FSDP2 model: a unit a layer, one for an untied embedding, one for the rest.

        The embedding of a tied model is in the root's unit with the output layer: a parameter has
        one owner. The root stays gathered after its forward pass, for it is the first needed again.
        """
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in self._layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        if not self.is_tied:
            fully_shard(self._embedding[0], mesh=mesh, mp_policy=precision)
        fully_shard(self, mesh=mesh, mp_policy=precision)

    def set_last_backward(self, is_last: bool) -> None:
        """Say whether the next backward pass is a minibatch's last: the one that reduces."""
        fsdp = cast(FSDPModule, self)
        fsdp.set_requires_gradient_sync(is_last)
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
        checkpoint.load_into(self.named_parameters())

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each parameter, one at a time, in bfloat16 on every rank.

        A collective: all ranks iterate to the end together. Cast before the gather, which halves
        the traffic and the memory. A tied output layer comes once, as the embedding.
        """
        self.reshard_all()
        for name, parameter in self.named_parameters():
            yield name, cast(DTensor, parameter.detach().to(torch.bfloat16)).full_tensor()

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
) -> Policy:
    """The sharded policy with the weights of a Hugging Face folder, ready for its optimizer.

    `storage_dtype` is that of the shards: masters are float32.
    Raises CheckpointError when the folder does not describe a model the learner can hold.
    """
    attention.register()
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        causal_lm = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=storage_dtype, attn_implementation=attention.NAME
        )
    if activation_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(causal_lm, temperature=temperature)
    checkpoint = Checkpoint(folder)
    names = [name for name, _ in policy.named_parameters()]
    checkpoint.check_names(names, optional=[TIED_HEAD] if policy.is_tied else [])
    policy.shard(mesh, compute_dtype=compute_dtype)
    policy.materialise(checkpoint, device=device)
    # Without dropout: transformers checkpoints activations in training mode only.
    return policy.train(activation_checkpointing)
