"""Layers that carry a state from token to token, computed one sequence of a packed row at a time.

Gated delta nets, Mamba layers and short convolutions see every token before them in the row, not
only the tokens of their own sequence, and no mask stops them. So each layer gets the sequences of
the row one after another, and starts each from an empty state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from april_rl.training.learner.model.attention import Packing

# Classes in transformers whose `forward` takes hidden states [1, T, H] as its first argument,
# returns the same shape, and mixes tokens by these alone: their other per-token arguments are
# masks, which are never passed. docs/models.md compares every family.
_MIXERS = frozenset(
    (
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention"),
        *("Lfm2ShortConv", "Lfm2MoeShortConv"),
        *("JambaMambaMixer", "BambaMixer", "FalconH1Mixer", "NemotronHMamba2Mixer"),
        "GraniteMoeHybridMambaLayer",
    )
)


def has_known_mixers(model: nn.Module) -> bool:
    return next(_mixers(model), None) is not None


def separate_sequences(layers: list[nn.Module]) -> None:
    """Make the mixers in these layers start from an empty state at each sequence of the row.

    A layer must be called with the keyword `packing`, as attention is. When activations are
    recomputed, the layer is called again, and its mixer gets the same sequences.
    """
    for layer in layers:
        for mixer in _mixers(layer):
            one_by_one = _OneByOne(mixer.forward)
            mixer.forward = one_by_one
            layer.register_forward_pre_hook(one_by_one.expect, with_kwargs=True)


class _OneByOne:
    """The forward function of a mixer, called once per sequence."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward
        self._lengths: list[int] = []

    def expect(self, _: nn.Module, __: object, options: dict[str, Any]) -> None:
        """Take the lengths of the row's sequences from the keyword arguments of the layer."""
        packing: Packing = options["packing"]
        self._lengths = list(packing.lengths)

    def __call__(
        self,
        hidden_states: Tensor,
        *arguments: object,
        packing: Packing | None = None,  # noqa: ARG002 -- some layers hand it on, others do not
        **options: object,
    ) -> Tensor:
        """Return the mixed hidden states [1, T, H]."""
        sequences = torch.split(hidden_states, self._lengths, dim=1)
        return torch.cat([self._forward(each, *arguments, **options) for each in sequences], dim=1)


def _mixers(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if type(part).__name__ in _MIXERS)
