"""Sizes of what the learner holds. Free of torch, because the memory plan reads them."""

from __future__ import annotations

from dataclasses import dataclass

SHARD_BYTES = 2 * 2**30  # size of a file of an export, which rank 0 holds whole
# Bytes of one block of float32 logits. On CPU a block that fits in the cache is fastest, as long as
# it has enough rows for an efficient matrix product; an accelerator needs few, large kernels.
CPU_BLOCK_BYTES = 8 * 2**20
BLOCK_BYTES = 256 * 2**20
MIN_BLOCK_ROWS = 512
BLOCK_MULTIPLE = 128  # of rows; a GPU's matrix product of an odd number of them takes three times


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model, in numbers (parameters) unless a name says bytes, and what it is."""

    model_type: str
    has_states: bool  # layers that carry a state from token to token
    has_known_routers: bool  # of experts, which can repeat choices (learner.router_replay)
    num_parameters: int
    num_trained: int  # all parameters, or the ones of its adapters
    has_adapters: bool
    num_layers: int
    hidden_size: int
    num_heads: int  # of the queries of a layer
    largest_tensor: int
    layer_parameters: int  # of the largest layer, with all its experts
    root_parameters: int  # of the FSDP unit that holds the output layer
    embedding_unit: int  # parameters of an embedding that is a unit of its own; tied ones are not
    largest_unit: int  # trained parameters of the largest FSDP unit
    kv_numbers: int  # keys and values of a token in all layers
    activation_bytes: float  # that autograd keeps for a token, in bfloat16
    checkpointed_bytes: float  # that it keeps if every layer is computed again
    layer_bytes: float  # that it keeps of the largest layer
    attention_bytes: float  # outputs of the attention of all layers, for a token, in bfloat16


def recomputed_layers(share: float, *, num_layers: int) -> list[int]:
    """Return the indices of the layers that are computed again in the backward pass.

    They are spread evenly. Up to a half, the last layer is not one of them, so its activations are
    gone when the first layer is computed again.
    """
    count = round(share * num_layers)
    return [index for index in range(num_layers) if index * count % num_layers < count]
