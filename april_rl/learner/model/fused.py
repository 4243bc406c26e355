"""Functions of a model compiled into few kernels, so that a GPU reads and writes memory less often.

Normalisations, the gates of MLPs and the output layer are many small operations, each of which
reads and writes whole activations. `torch.compile` joins them. Here it rounds where the single
operations round, as the engine does; left alone it would keep float32 in between, and a quarter of
the normalised bfloat16 values would differ from the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from april_rl.errors import RunError

_Function = Callable[..., Any]
# Forms of one function: dtype, gradient or none, and sizes that differ within a model.
_MAX_FORMS = 64


class CompilerError(RunError):
    """torch cannot compile functions on this machine."""


@cache
def compiled(function: _Function) -> _Function:
    """Return `function` as `torch.compile` makes it, once in a process; numbers of tokens vary."""
    return torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})


def fuse(model: nn.Module) -> None:
    """Compile normalisations and MLPs of a Hugging Face model, which are known by the names of
    their classes.
    """
    torch._dynamo.config.recompile_limit = max(_MAX_FORMS, torch._dynamo.config.recompile_limit)
    for module in model.modules():
        kind = type(module)
        if "RMSNorm" in kind.__name__ or kind.__name__.endswith("MLP"):
            vars(module)["forward"] = MethodType(compiled(kind.forward), module)


def check_compiler(device: torch.device) -> None:
    """Raise CompilerError, with the remedy, if a small function cannot be compiled."""
    values = torch.ones(4, device=device, requires_grad=True)
    try:
        compiled(_probe)(values).sum().backward()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompilerError(
            f"learner.fused: torch cannot compile for {device.type} here, which needs a C compiler "
            f"such as gcc: install one, or set learner.fused=false. torch's message: {error}"
        ) from error


def _probe(values: torch.Tensor) -> torch.Tensor:
    return values.square() * 2
