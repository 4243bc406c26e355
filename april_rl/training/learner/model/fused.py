"""Functions of a model compiled into few kernels, so that a GPU reads and writes memory less often.

Normalisations, the gates of MLPs, rotary embeddings and the output layer are many small operations,
each of which reads and writes whole activations. `torch.compile` joins them. Here it rounds where
the single operations round, as the engine does; by default it would keep float32 in between, and a
quarter of the normalised bfloat16 values would differ from the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from april_rl.errors import RunError

_Function = Callable[..., Any]
# Number of compiled variants that one function may have: they differ in dtype, in whether there is
# a gradient, and in the sizes that vary within a model.
_MAX_FORMS = 64
_ROTARY = "apply_rotary_pos_emb"


class CompilerError(RunError):
    """torch cannot compile functions on this machine."""


@cache
def compile_function(function: _Function) -> _Function:
    """Return `function` compiled for any number of tokens; compiled once per process."""
    return torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})


@cache
def partition_function(function: _Function) -> _Function:
    """Return `function` without kernels, for any device and one number of tokens: its forward pass
    keeps the tensors that the compiled one keeps.
    """
    return torch.compile(function, dynamic=False, backend="aot_eager_decomp_partition")


def fuse(
    model: nn.Module, *, compiled: Callable[[_Function], _Function] = compile_function
) -> None:
    """Compile the normalisations and MLPs of a Hugging Face model, found by their class names, and
    the rotary embeddings that its attention layers call.
    """
    torch._dynamo.config.recompile_limit = max(_MAX_FORMS, torch._dynamo.config.recompile_limit)
    for module in model.modules():
        kind, forward = type(module), type(module).forward
        if "RMSNorm" in kind.__name__ or kind.__name__.endswith("MLP"):
            vars(module)["forward"] = MethodType(compiled(forward), module)
        elif isinstance(forward, FunctionType) and _ROTARY in _global_names(forward):
            whole = _with_rotary(forward, compiled)
            vars(module)["forward"] = MethodType(whole, module)


def _global_names(function: FunctionType) -> set[str]:
    """Return the names in a function's code that its Python module defines."""
    return set(function.__code__.co_names) & function.__globals__.keys()


def _with_rotary(
    function: FunctionType, compiled: Callable[[_Function], _Function]
) -> FunctionType:
    """Return a copy of an attention's forward function that calls the compiled rotary embedding,
    where the function itself calls the one that its Python module defines.
    """
    names = function.__globals__
    names = {**names, _ROTARY: compiled(names[_ROTARY])}
    copy = FunctionType(
        function.__code__, names, closure=function.__closure__, argdefs=function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def check_compiler(device: torch.device) -> None:
    """Raise CompilerError, with the remedy, if a small function cannot be compiled."""
    values = torch.ones(4, device=device, requires_grad=True)
    try:
        compile_function(_probe)(values).sum().backward()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompilerError(
            f"learner.fused: torch cannot compile for {device.type} here, which needs a C compiler "
            f"such as gcc: install one, or set learner.fused=false. torch's message: {error}"
        ) from error


def _probe(values: torch.Tensor) -> torch.Tensor:
    return values.square() * 2
