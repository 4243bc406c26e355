"""Low-rank adapters through peft: a layer computes W + (alpha / r) B A, and W is frozen.

Legend: W [O, I] the weight of a linear layer, A [r, I], B [O, r]. The forward pass keeps the three
matrices apart, as peft does. Engine and checkpoints get the sum under the name of W, in the compute
dtype: in bfloat16, a sum that moved by less than half a rounding step still equals W. Functions
that take a sharded module accept one with or without adapters; its FSDP units must be resharded.
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
from april_rl.run.checkpointing.file_mode import mode_of_new_files

ADAPTER = "default"  # peft's name for the only adapter of a layer
ADAPTER_FOLDER, WEIGHTS_FILE = "adapter", "adapter_model.safetensors"
_ALL = "all-linear"  # peft's name for every linear layer except the output layer
_WRAPPED = ".base_layer."  # part of the parameter names of a layer that peft has wrapped
_PREFIX = "base_model.model."  # prefix of every parameter name in a peft folder


class LoraError(RunError):
    """lora.target_modules does not fit the model."""


def inject(causal_lm: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze the model and add float32 adapters to the chosen layers, on the meta device.

    Raises LoraError when a name matches no linear layer, when a mixture-of-experts model gets
    targets outside attention, or when peft refuses a layer, such as some Mamba layers.
    """
    _check_targets(causal_lm, lora.target_modules)
    config = PeftConfig(
        r=cast(int, lora.rank),
        lora_alpha=cast(int, lora.alpha),  # peft types it as int and also computes with a float
        target_modules=_ALL if lora.target_modules is None else lora.target_modules,
    )
    try:
        inject_adapter_in_model(config, causal_lm, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise LoraError(
            f"lora.target_modules={lora.target_modules or 'null'}: peft cannot adapt these "
            f"layers of this model: {error}; choose others, such as [q_proj,v_proj]"
        ) from error
    for layer in _lora_layers(causal_lm).values():
        layer.lora_A.float()
        layer.lora_B.float()


@torch.no_grad()
def initialise(module: nn.Module, *, seed: int) -> None:
    """Fill A uniformly within ± 1 / √I, as peft does, and B with zeros.

    Every rank draws the whole matrices in the same order and keeps its rows, so the adapters do not
    depend on the number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in _lora_layers(module).values():
        a, b = (cast(DTensor, matrix) for matrix in _matrices(layer))
        whole = torch.empty(a.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        a.copy_(distribute_tensor(whole, a.device_mesh, a.placements, src_data_rank=None))
        b.zero_()


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of the model without its adapters, under the original names."""
    adapters = {id(p) for layer in _lora_layers(module).values() for p in _matrices(layer)}
    for name, parameter in module.named_parameters():
        if id(parameter) not in adapters:
            yield name.replace(_WRAPPED, "."), parameter


def merged_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `base_parameters`, with W + (alpha / r) B A as the tensor of an adapted W.

    A collective. The sum is float32; each rank computes its own rows, one parameter at a time.
    """
    adapted = {id(_frozen_weight(layer)): layer for layer in _lora_layers(module).values()}
    for name, parameter in base_parameters(module):
        layer = adapted.get(id(parameter))
        yield name, parameter.detach() if layer is None else _merge(layer)


def adapter_writer(
    module: nn.Module, lora: LoraConfig | None, *, base: str
) -> Callable[[Path], None] | None:
    """Return a function that writes the current adapters into the subfolder `adapter` of a folder.

    `peft.PeftModel` reads that subfolder. Returns None when `lora` is None. `base` is the path of
    the adapted model. A collective; only rank 0 holds the whole tensors (float32, in host memory),
    so only rank 0 may call the function.
    """
    if lora is None:
        return None
    config = _peft_config(module, lora, base=base)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _adapter_tensors(module):
        if dist.get_rank() == 0:
            tensors[name] = tensor.cpu()

    def write(folder: Path) -> None:
        _write(config, tensors, folder / ADAPTER_FOLDER)

    return write


def write_adapter(module: nn.Module, lora: LoraConfig, folder: Path) -> int:
    """Write the current adapters into `folder`, in the form of peft, on every rank; return the
    bytes of the tensors. A collective.
    """
    tensors = {name: tensor.cpu() for name, tensor in _adapter_tensors(module)}
    _write(_peft_config(module, lora, base=""), tensors, folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def _write(config: PeftConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    config.save_pretrained(str(folder))
    path = folder / WEIGHTS_FILE
    with mode_of_new_files(path):
        save_file(tensors, path, metadata={"format": "pt"})


def _peft_config(module: nn.Module, lora: LoraConfig, *, base: str) -> PeftConfig:
    targets = lora.target_modules or {name.rpartition(".")[2] for name in _lora_layers(module)}
    return PeftConfig(
        r=cast(int, lora.rank),
        lora_alpha=cast(int, lora.alpha),
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Use the frozen model alone inside the `with` block, by scaling the adapters with 0.

    peft's own switch would also mark the adapters as not trained. But FSDP chooses the precision of
    gradient reduction at the first forward pass, from what is trained at that moment.
    """
    layers = _lora_layers(module).values()
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def _lora_layers(module: nn.Module) -> dict[str, LoraLayer]:
    return {name: m for name, m in module.named_modules() if isinstance(m, LoraLayer)}


def _matrices(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B."""
    parts = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    return parts[0].get_parameter("weight"), parts[1].get_parameter("weight")


def _adapter_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the peft name and the whole float32 tensor of every A and B; a collective."""
    for name, layer in _lora_layers(module).items():
        for part, matrix in zip(("lora_A", "lora_B"), _matrices(layer), strict=True):
            yield f"{_PREFIX}{name}.{part}.weight", cast(DTensor, matrix.detach()).full_tensor()


def _frozen_weight(layer: LoraLayer) -> nn.Parameter:
    return layer.base_layer.get_parameter("weight")


def _merge(layer: LoraLayer) -> Tensor:
    """Return W + (alpha / r) B A [O, I], float32, sharded like W: B has its rows, A is gathered."""
    weight = cast(DTensor, _frozen_weight(layer).detach())
    a, b = (cast(DTensor, matrix.detach()) for matrix in _matrices(layer))
    rows = torch.addmm(
        weight.to_local().float(), b.to_local(), a.full_tensor(), alpha=layer.scaling[ADAPTER]
    )
    return DTensor.from_local(
        rows, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )


def _check_targets(causal_lm: PreTrainedModel, wanted: Sequence[str] | None) -> None:
    """Raise LoraError unless every name is the last part of a name in `_linear_layers`."""
    linear = _linear_layers(causal_lm)
    for name in wanted or ():
        if not _find_layers(linear, name):
            raise LoraError(
                f"lora.target_modules={list(wanted or ())}: {name} is not a linear layer that can "
                f"have adapters; choose from {_ends(linear)}"
            )
    attention = [name for name in linear if "attn" in name]
    chosen = {layer for name in wanted or () for layer in _find_layers(linear, name)}
    if stacked_experts(causal_lm) and not (chosen and chosen <= set(attention)):
        raise LoraError(
            "lora.target_modules: the experts of a mixture-of-experts model cannot have adapters, "
            "and neither can layers that share their names; choose from the attention layers "
            f"{_ends(attention)}, or train the whole model with lora.rank=null"
        )


def _linear_layers(causal_lm: PreTrainedModel) -> list[str]:
    """Return the names of the layers that can have adapters.

    The output layer is left out: its forward pass never runs, because LogprobHead reads its weight.
    """
    head: nn.Module = causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [
        name
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def stacked_experts(causal_lm: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters [E, ., .] in which the experts of a layer are stacked."""
    named = causal_lm.named_parameters()
    return [each for name, each in named if each.dim() == 3 and not name.endswith(".weight")]


def _find_layers(layers: list[str], end: str) -> list[str]:
    """Return the layers whose dotted name ends with the parts `end`."""
    return [layer for layer in layers if f".{layer}".endswith(f".{end}")]


def _ends(names: list[str]) -> str:
    """Join the last parts of dotted names, each once, in order."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
