"""Routers of mixtures of experts, which can repeat the choices of an earlier forward pass, or those
that the engine made when it sampled the tokens (rollout routing replay, Ma et al. 2025).

Legend: [T] tokens of a packed row, [K] experts of a token. A router scores all experts, and takes
the best K with `torch.topk`. To repeat a choice, its own code runs again, and only the call of topk
returns the earlier indices: scores, weights and gradients come from the current parameters. Choices
wait in host memory, where a token takes 2 bytes for each of its experts in each layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Router classes in transformers, and the number of the call of topk in their `forward` that chooses
# the experts. An expert that is not among the best K must still get the weight of its score; in
# DeepSeek-V2 it may get 0.
_CHOOSING_CALL: Mapping[str, int] = {
    **dict.fromkeys(
        (
            *("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter"),
            *("Qwen3_5MoeTopKRouter", "MixtralTopKRouter", "OlmoeTopKRouter", "FlexOlmoTopKRouter"),
            *("GraniteMoeTopKRouter", "GraniteMoeHybridTopKRouter", "GraniteMoeSharedTopKRouter"),
            *("GraniteMoeSWATopKRouter", "HunYuanMoEV1Gate", "MellumTopKRouter"),
            "Ernie4_5_MoeTopKRouter",
        ),
        1,
    ),
    # The first two calls choose groups of experts.
    **dict.fromkeys(
        (
            *("DeepseekV3TopkRouter", "Dots1TopkRouter", "ExaoneMoeTopkRouter"),
            *("Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter", "KimiLinearTopkRouter"),
            *("NemotronHTopkRouter", "SolarOpenTopkRouter"),
        ),
        3,
    ),
}
_STORED = torch.int16  # dtype of stored expert numbers

_LAYER = re.compile(r"\blayers\.(\d+)\.")  # the layer number in the name of a module

# [T, K] of each router, in the order of the layers; on the host. -1: the router chooses.
Choices = tuple[Tensor, ...]


def has_known_routers(model: nn.Module) -> bool:
    """Return whether a model has routers that can repeat choices."""
    return next(_routers(model), None) is not None


class Routers:
    """The routers of a model, with their forward functions replaced. Without a model it does
    nothing.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """Find the routers of `model`, which must have one, and replace their functions."""
        found = [] if model is None else list(_routers(model))
        self._routers = [_Router(part) for _, part in found]
        self._layers = [int(_LAYER.findall(name)[0]) for name, _ in found]
        assert model is None or self._routers, "preflight refuses a model without known routers"

    def last_choices(self) -> Choices:
        return tuple(router.choice.cpu() for router in self._routers)

    def of_engine(self, experts: Tensor | None) -> Choices | None:
        """Return the choices in `experts` [T, layers, K]; None if there are none."""
        return None if experts is None else tuple(experts[:, layer] for layer in self._layers)

    @contextmanager
    def repeating(self, choices: Choices | None) -> Iterator[None]:
        """Repeat `choices` in every pass of the block, also where the backward pass recomputes
        activations; with None the routers choose.
        """
        if choices is None:
            yield
            return
        try:
            for router, choice in zip(self._routers, choices, strict=True):
                router.repeated = choice
            yield
        finally:
            for router in self._routers:
                router.repeated = None


class _Router:
    """The forward function of a router."""

    def __init__(self, module: nn.Module) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._number = _CHOOSING_CALL[type(module).__name__]
        self.choice: Tensor  # [T, K], of the last pass, on its device
        self.repeated: Tensor | None = None  # [T, K] for the next passes; None: choose
        module.forward = self

    def __call__(self, hidden_states: Tensor) -> object:
        with _Topk(self._number, self.repeated) as topk:
            output: object = self._forward(hidden_states)
        self.choice = topk.indices.to(_STORED)
        return output


class _Topk(TorchFunctionMode):
    """Watches the calls of topk in a block, and may replace the indices of one."""

    def __init__(self, number: int, repeated: Tensor | None) -> None:
        super().__init__()
        self._calls_left, self._repeated = number, repeated
        self.indices: Tensor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run a call of torch that the block makes."""
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        self._calls_left -= 1
        result = func(*args, **(kwargs or {}))
        if not self._calls_left and self._repeated is not None:
            repeated = self._repeated.to(result.indices)
            indices = torch.where(repeated < 0, result.indices, repeated)
            result = torch.return_types.topk((args[0].gather(-1, indices), indices))
        if not self._calls_left:
            self.indices = result.indices
        return result


def _routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the known routers of a model with their names."""
    return (each for each in model.named_modules() if type(each[1]).__name__ in _CHOOSING_CALL)
