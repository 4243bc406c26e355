"""Sizes of a model for the memory plan, counted on the model itself with empty parameters.

Nothing is derived from a configuration, so a new family of models needs no formula here: parameters
are counted, and activations and the KV cache are what a forward pass on the meta device keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from april_rl.config.lora import LoraConfig
from april_rl.training.learner.model.architecture import (
    empty_model,
    layers_of,
    recompute_activations,
)
from april_rl.training.learner.model.attention import Packing
from april_rl.training.learner.model.fused import fuse, partition_function
from april_rl.training.learner.model.lora import inject, stacked_experts
from april_rl.training.learner.model.mixers import has_known_mixers
from april_rl.training.learner.model.routers import has_known_routers
from april_rl.training.learner.model.sizes import ModelSizes

_COUNTING = "april_rl_counting"  # name in transformers of an attention that computes nothing
_TOKENS = 512  # length of the row in the forward pass


def model_sizes(
    config: PreTrainedConfig, lora: LoraConfig, *, is_fused: bool = False
) -> ModelSizes:
    """Return the sizes of a model with these adapters; takes a second at any size, and two with
    activations as `learner.fused` keeps them.

    Raise UnsupportedModelError when the learner cannot compute the model, LoraError when `lora`
    does not fit it.
    """
    # On the CPU each weight would be allocated for a moment, and leave a hole in the heap.
    with torch.device("meta"):
        causal_lm = empty_model(config, dtype=torch.bfloat16)
    causal_lm.to("meta")  # type: ignore[arg-type]  # buffers that name their device, too
    causal_lm.tie_weights()
    if is_fused:
        fuse(causal_lm.base_model, compiled=partition_function)
    embedding: nn.Module = causal_lm.get_input_embeddings()
    layers = layers_of(causal_lm)
    num_parameters, in_layers = _count(causal_lm), sum(map(_count, layers))
    own_unit = 0 if causal_lm.config.tie_word_embeddings else _count(embedding)
    kept = _Kept(causal_lm, layers)
    activations, layer = kept.num_bytes, max(kept.of_layers)
    if causal_lm.supports_gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        recompute_activations(causal_lm)
    inputs = _Kept(causal_lm, layers).num_bytes
    if lora.rank is not None:
        inject(causal_lm, lora)
    return ModelSizes(
        model_type=causal_lm.config.model_type,
        has_states=has_known_mixers(causal_lm),
        has_known_routers=has_known_routers(causal_lm),
        num_parameters=num_parameters,
        num_trained=_count_trained(causal_lm),
        has_adapters=lora.rank is not None,
        num_layers=len(layers),
        hidden_size=embedding.get_parameter("weight").shape[1],
        num_heads=kept.num_heads,
        largest_tensor=max(parameter.numel() for parameter in causal_lm.parameters()),
        layer_parameters=max(map(_count, layers)),
        root_parameters=num_parameters - in_layers - own_unit,
        embedding_unit=own_unit,
        largest_unit=max(_count_trained_by_unit(causal_lm, layers)),
        kv_numbers=kept.kv_numbers,
        activation_bytes=activations / _TOKENS,
        checkpointed_bytes=inputs / _TOKENS,
        layer_bytes=layer / _TOKENS,
        attention_bytes=kept.attention_bytes / _TOKENS,
        expert_parameters=sum(map(torch.numel, stacked_experts(causal_lm))),
    )


class _Kept:
    """The tensors that a forward pass of `_TOKENS` tokens keeps for the backward pass, other than
    parameters, and the numbers that it adds to the KV cache.
    """

    def __init__(self, causal_lm: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self.num_bytes, self.of_layers = 0, list[int]()  # bytes of the whole pass, of each layer
        self.kv_numbers = self.num_heads = 0  # keys and values of a token; heads of a layer
        self.attention_bytes = 0
        self._model = causal_lm
        self._held = {p.untyped_storage()._cdata for p in causal_lm.parameters()}
        self._tensors: list[Tensor] = []  # kept alive, so that no address is used twice
        self._pass(layers)

    def _pass(self, layers: Sequence[nn.Module]) -> None:
        device = self._model.device
        ALL_ATTENTION_FUNCTIONS.register(_COUNTING, self._attention)
        self._model.set_attn_implementation(_COUNTING)
        with ExitStack() as hooks:
            for layer in layers:
                hooks.callback(layer.register_forward_pre_hook(self._enter).remove)
                hooks.callback(layer.register_forward_hook(self._leave).remove)
            hooks.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
            hooks.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "The .grad attribute")  # a compiler looks at it
            self._model.base_model(
                input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64, device=device),
                position_ids=torch.arange(_TOKENS, device=device)[None],
                use_cache=False,
                packing=Packing.of((_TOKENS,), device=device),
            )

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._held:
            self._held.add(storage)
            self._tensors.append(tensor)
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def _enter(self, *_: object) -> None:
        self.of_layers.append(-self.num_bytes)

    def _leave(self, *_: object) -> None:
        self.of_layers[-1] += self.num_bytes

    def _attention(
        self, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: object, **___: object
    ) -> tuple[Tensor, None]:
        """Keep what FlashAttention keeps, and compute nothing."""
        self.num_heads = max(self.num_heads, q.shape[1])
        self.kv_numbers += sum(x.shape[1] * x.shape[3] for x in (k, v))
        out, normaliser = cast(
            "tuple[Tensor, Tensor]",
            _FlashAttention.apply(q, k, v),  # type: ignore[no-untyped-call]
        )
        self.attention_bytes += out.nbytes + normaliser.nbytes
        return out, None


class _FlashAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and a number for each token and head."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, v.shape[3])
        normaliser = q.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, normaliser)
        return out, normaliser


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _count_trained_by_unit(causal_lm: PreTrainedModel, layers: Sequence[nn.Module]) -> list[int]:
    """Return the number of trained parameters of each FSDP unit: layers, embedding, root."""
    embedding: nn.Module = causal_lm.get_input_embeddings()
    units = list(map(_count_trained, layers))
    if not causal_lm.config.tie_word_embeddings:
        units.append(_count_trained(embedding))
    return [*units, _count_trained(causal_lm) - sum(units)]
