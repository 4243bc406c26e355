"""Low-rank adapters through peft: of W + (alpha / r) B A the model's own W is frozen.

Legend: W [O, I] the weight of a linear layer, A [r, I], B [O, r]. The layer computes with the three
apart, as peft does; engine and checkpoints get the sum under the name of W, in the precision of
computation: in bfloat16 a sum that has moved less than half a step is W to them. What takes a
sharded module takes it with or without adapters, its units resharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from april_rl.config.lora import LoraConfig
from april_rl.errors import RunError

ADAPTER = "default"  # peft's name for the only adapter of a layer
ADAPTER_FOLDER, WEIGHTS_FILE = "adapter", "adapter_model.safetensors"
_ALL = "all-linear"  # peft's word for every linear layer but the output layer
_WRAPPED = ".base_layer."  # stands in the names of the layer that peft put its own around
_PREFIX = "base_model.model."  # of every name in a folder of peft


class LoraError(RunError):
    """lora.target_modules does not go with the model."""


def inject(causal_lm: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze the model and give the chosen layers float32 adapters, on the meta device.

    Raises LoraError when a name belongs to no linear layer, or the model has experts and names are
    not those of attention alone.
    """
    _check_targets(causal_lm, lora.target_modules)
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),  # peft computes with what it is given
        target_modules=_ALL if lora.target_modules is None else lora.target_modules,
    )
    inject_adapter_in_model(config, causal_lm, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for layer in _adapted(causal_lm).values():
        layer.lora_A.float()
        layer.lora_B.float()


@torch.no_grad()
def initialise(module: nn.Module, *, seed: int) -> None:
    """Fill A uniformly within ± 1 / √I, as peft does, and B with zeros.

    Every rank draws whole matrices in the same order and keeps its rows: the same adapters for any
    number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted(module).values():
        a, b = (cast(DTensor, matrix) for matrix in _matrices(layer))
        whole = torch.empty(a.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        a.copy_(distribute_tensor(whole, a.device_mesh, a.placements, src_data_rank=None))
        b.zero_()


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of the model without its adapters, as if there were none."""
    adapters = {id(p) for layer in _adapted(module).values() for p in _matrices(layer)}
    for name, parameter in module.named_parameters():
        if id(parameter) not in adapters:
            yield name.replace(_WRAPPED, "."), parameter


def merged_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each parameter of `base_parameters`; W + (alpha / r) B A for an adapted W.

    A collective; the sum is float32, each rank computes its rows of one parameter at a time.
    """
    adapted = {id(_frozen(layer)): layer for layer in _adapted(module).values()}
    for name, parameter in base_parameters(module):
        layer = adapted.get(id(parameter))
        yield name, parameter.detach() if layer is None else _merged(layer)


def adapter_writer(
    module: nn.Module, lora: LoraConfig | None, *, base: str
) -> Callable[[Path], None] | None:
    """Writes the adapters as they are now into a folder's subfolder, as `peft.PeftModel` reads it;
    None where there are none.

    A collective; what it returns is for rank 0, the only one that keeps the whole tensors (float32,
    in host memory). `base` is the path of the model that is adapted.
    """
    if lora is None:
        return None
    targets = lora.target_modules or {name.rpartition(".")[2] for name in _adapted(module)}
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    tensors: dict[str, Tensor] = {}
    for name, tensor in _adapter_tensors(module):
        if dist.get_rank() == 0:
            tensors[name] = tensor.cpu()

    def write(folder: Path) -> None:
        config.save_pretrained(str(folder / ADAPTER_FOLDER))
        save_file(tensors, folder / ADAPTER_FOLDER / WEIGHTS_FILE, metadata={"format": "pt"})

    return write


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """The frozen model alone while it lasts: the products of the adapters are multiplied by 0.

    peft's own switch also says that they are not trained, and FSDP settles at the first forward
    pass, by what is trained then, in which precision it reduces gradients.
    """
    layers = _adapted(module).values()
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def _adapted(module: nn.Module) -> dict[str, LoraLayer]:
    """The layers that have adapters, by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, LoraLayer)}


def _matrices(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B."""
    parts = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    return parts[0].get_parameter("weight"), parts[1].get_parameter("weight")


def _adapter_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name, as peft's folders have it, and whole float32 tensor of every A and B; a collective."""
    for name, layer in _adapted(module).items():
        for part, matrix in zip(("lora_A", "lora_B"), _matrices(layer), strict=True):
            yield f"{_PREFIX}{name}.{part}.weight", cast(DTensor, matrix.detach()).full_tensor()


def _frozen(layer: LoraLayer) -> nn.Parameter:
    """W."""
    return layer.base_layer.get_parameter("weight")


def _merged(layer: LoraLayer) -> Tensor:
    """W + (alpha / r) B A [O, I], float32, sharded like W: B has the rows of W, A is gathered."""
    weight = cast(DTensor, _frozen(layer).detach())
    a, b = (cast(DTensor, matrix.detach()) for matrix in _matrices(layer))
    rows = torch.addmm(
        weight.to_local().float(), b.to_local(), a.full_tensor(), alpha=layer.scaling[ADAPTER]
    )
    return DTensor.from_local(
        rows, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )


def _check_targets(causal_lm: PreTrainedModel, wanted: Sequence[str] | None) -> None:
    """Raise LoraError unless every name is the end of a layer's that can have adapters."""
    linear = _linear_layers(causal_lm)
    for name in wanted or ():
        if not _named(linear, name):
            raise LoraError(
                f"lora.target_modules={list(wanted or ())}: {name} is not a linear layer that can "
                f"have adapters; the model has {_ends(linear)}"
            )
    attention = [name for name in linear if "attn" in name]
    chosen = {layer for name in wanted or () for layer in _named(linear, name)}
    if _has_experts(causal_lm) and not (chosen and chosen <= set(attention)):
        raise LoraError(
            "lora.target_modules: the experts of a mixture of experts cannot have adapters, nor "
            f"layers that share their names; choose from attention's {_ends(attention)}, or train "
            "the whole model with lora.rank=0"
        )


def _linear_layers(causal_lm: PreTrainedModel) -> list[str]:
    """Names of the layers that can have adapters; the output layer computes no logits here."""
    head: nn.Module = causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [
        name
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def _has_experts(causal_lm: PreTrainedModel) -> bool:
    """Whether matrices of several experts are one parameter [E, ., .] of a module of their own."""
    return any(
        parameter.dim() == 3 and not name.endswith(".weight")
        for name, parameter in causal_lm.named_parameters()
    )


def _named(layers: list[str], end: str) -> list[str]:
    """Those whose dotted name ends with the parts `end`."""
    return [layer for layer in layers if f".{layer}".endswith(f".{end}")]


def _ends(names: list[str]) -> str:
    """The last parts of dotted names, each once, in order."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
