"""Sizes of what the learner holds. Free of torch, because the memory plan reads them."""

from __future__ import annotations

from dataclasses import dataclass

SHARD_BYTES = 2 * 2**30  # size of a file of an export, which rank 0 holds whole
# Bytes of one block of float32 logits. On CPU a block that fits in the cache is fastest, as long as
# it has enough rows for an efficient matrix product; an accelerator needs few, large kernels.
CPU_BLOCK_BYTES = 8 * 2**20
BLOCK_BYTES = 256 * 2**20
MIN_BLOCK_ROWS = 512
# A block has a multiple of this many rows: on a GPU, a matrix product of an odd number of rows
# takes three times as long.
BLOCK_MULTIPLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model, and some of its properties; parameters are counted unless a name says
    bytes.
    """

    model_type: str
    has_states: bool  # layers that carry a state from token to token
    has_known_routers: bool  # routers that can repeat choices of experts (learner.router_replay)
    num_parameters: int
    num_trained: int  # all parameters, or only those of the adapters
    has_adapters: bool
    num_layers: int
    hidden_size: int
    num_heads: int  # query heads of a layer
    largest_tensor: int
    layer_parameters: int  # parameters of the largest layer, with all its experts
    root_parameters: int  # parameters of the FSDP unit that holds the output layer
    embedding_unit: int  # parameters of an embedding that is a unit of its own; tied ones are not
    largest_unit: int  # trained parameters of the largest FSDP unit
    kv_numbers: int  # keys and values of a token in all layers
    activation_bytes: float  # what autograd keeps for a token, in bfloat16
    checkpointed_bytes: float  # the same if every layer is computed again
    layer_bytes: float  # the part of the largest layer
    attention_bytes: float  # outputs of the attention of all layers, for a token, in bfloat16
    expert_parameters: int = 0  # of all experts that routers choose from


def recomputed_layers(share: float, *, num_layers: int) -> list[int]:
    """Return the indices of the layers that are computed again in the backward pass.

    They are spread evenly. Up to a share of one half, the last layer is not one of them: its
    activations are gone by the time a layer is computed again.
    """
    count = round(share * num_layers)
    return [index for index in range(num_layers) if index * count % num_layers < count]
