"""Checks before training starts: the machine, the model, its context length. Everything that is
missing is in one message.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from transformers import AutoConfig, PreTrainedConfig

from april_rl.errors import RunError
from april_rl.runtime.engine_build import installed_engines, wrong_engine
from april_rl.supervision.host_memory import host_memory

_GIB = 1 << 30


class PreflightError(RunError):
    """The run cannot start on this machine with these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of the model, from its config.json."""

    window_tokens: int  # longest context, prompt and response
    hidden_size: int
    num_heads: int  # of attention
    num_parameters: int  # of all layers and experts, from the sizes of their matrices
    num_layers: int
    attention_size: int  # of all queries of a token
    key_value_size: int  # of all keys of a token; values have the same size
    mlp_size: int  # width of the MLPs that a token passes in a layer
    embedding_parameters: int  # of the embedding; an untied output layer has as many
    is_tied: bool
    expert_parameters: int  # of one matrix of all experts of a layer; 0: no experts

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of a layer, on average."""
        embeddings = self.embedding_parameters * (1 if self.is_tied else 2)
        return (self.num_parameters - embeddings) // self.num_layers


def num_gpus(
    *, devices: Path = Path("/dev"), nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> int:
    """Return how many GPUs of this machine may be used.

    Counts device files and the nodes of AMD's kernel driver: asking CUDA would start CUDA in the
    controller.
    """
    nvidia = [p for p in devices.glob("nvidia*") if p.name[len("nvidia") :].isdigit()]
    # The driver's nodes are GPUs and processors; processors have gpu_id 0.
    amd = [node for node in nodes.glob("*/gpu_id") if node.read_text().strip() != "0"]
    return num_visible(len(nvidia) or len(amd), os.environ)


def num_visible(gpus: int, environment: Mapping[str, str]) -> int:
    """Return how many of a machine's `gpus` the environment lets processes see."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in environment:
            names = environment[variable].split(",")
            gpus = min(gpus, sum(name.strip() not in ("", "-1") for name in names))
    return gpus


def pick_device(wanted: str, *, gpus: int | None = None) -> str:
    """Return `cpu` or `cuda` (also for ROCm) for runtime.device; auto takes a GPU if there is one.

    `gpus` is the number of GPUs; None: those of this machine.
    """
    if wanted == "auto":
        return "cuda" if (num_gpus() if gpus is None else gpus) else "cpu"
    return "cpu" if wanted == "cpu" else "cuda"


def check_start(
    *,
    model_path: str,
    device: str,
    num_workers: int,
    is_cluster: bool,
    tensor_parallel_size: int,
    window_tokens: int,
    window_key: str,
    batch_bytes: int = 0,
) -> ModelFacts:
    """Return the model's facts if the run can start; raise PreflightError with all that is missing.

    `window_tokens` is the maximum of prompt and response tokens, set by `window_key`. With
    `is_cluster` the GPUs are elsewhere and Ray counts them. `batch_bytes` is the largest batch of a
    step.
    """
    missing = []
    if device == "cuda" and not is_cluster and num_gpus() < num_workers:
        missing.append(
            f"GPUs: runtime.num_workers={num_workers} needs {num_workers} GPUs; this machine has "
            f"{num_gpus()}"
        )
    if device == "cpu" and not is_cluster:
        missing += _too_few_cores(num_workers)
    missing += _batch_too_large(batch_bytes)
    missing += wrong_engine(device, installed=installed_engines())
    facts = None
    without_network_go_offline()
    try:
        facts = model_facts(model_path)
    except PreflightError as error:
        missing.append(f"model: {error}")
    if facts is not None:
        missing += _too_short(facts, window_tokens, window_key)
        missing += _not_divisible(facts, tensor_parallel_size)
    if missing or facts is None:
        lines = "\n".join(f"  - {line}" for line in missing)
        raise PreflightError(f"this run cannot start here:\n{lines}")
    return facts


def _too_few_cores(num_workers: int) -> list[str]:
    """Return a message when there are more workers than cores: they would only share them."""
    cores = os.cpu_count() or 1
    if num_workers <= cores:
        return []
    return [
        f"cores: runtime.num_workers={num_workers} needs {num_workers} cores; this machine has "
        f"{cores}: lower it, or join several machines (docs/multi_node.md)"
    ]


def _batch_too_large(batch_bytes: int) -> list[str]:
    """Return a message when this machine's free memory does not hold the batch of a step."""
    free = host_memory().free
    if batch_bytes <= free:
        return []
    return [
        "batch: trainer.num_groups · rollout.group_size samples of full length need "
        f"{batch_bytes / _GIB:,.0f} GiB; this machine has {free / _GIB:.0f} GiB free: lower one of "
        "the two"
    ]


def _too_short(facts: ModelFacts, window_tokens: int, window_key: str) -> list[str]:
    """Return a message when a sample may be longer than the model's context length."""
    if window_tokens <= facts.window_tokens:
        return []
    return [
        f"context length: {window_key} = {window_tokens} exceeds the model's maximum, "
        f"{facts.window_tokens} tokens"
    ]


def _not_divisible(facts: ModelFacts, tensor_parallel_size: int) -> list[str]:
    """Return a message when the workers of an engine cannot share the attention heads equally."""
    if facts.num_heads % tensor_parallel_size == 0:
        return []
    return [
        f"heads: engine.tensor_parallel_size={tensor_parallel_size} does not divide the model's "
        f"{facts.num_heads} attention heads"
    ]


def without_network_go_offline() -> None:
    """Switch Hugging Face's libraries offline if their hub is out of reach: they would retry long.

    They read the environment variable when they are imported, here and in worker processes.
    """
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(hub, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        constants.HF_HUB_OFFLINE = True


def _refuse_missing_folder(path: Path) -> None:
    """Raise PreflightError for a folder that is not there, and name those beside it; for the
    directory of a run, name an export.
    """
    if exports := sorted(path.glob("exports/step_*"), key=lambda export: export.stat().st_mtime):
        raise PreflightError(f"model.path={path} is a run directory: give an export, {exports[-1]}")
    has_parent = path.parent.is_dir() and path.parent != Path()
    if path.exists() or not (has_parent or path.is_absolute()):
        return
    beside = sorted(one.name for one in path.parent.iterdir())[:5] if has_parent else []
    also = f"; {path.parent} has {', '.join(beside)}" if beside else ""
    raise PreflightError(f"model.path={path} does not exist{also}")


def model_facts(model_path: str) -> ModelFacts:
    """Read config.json; raise PreflightError naming model.path when there is none, or when it lacks
    the sizes of a decoder.
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        _refuse_missing_folder(Path(model_path))
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PreflightError(
            f"model.path={model_path} is neither a Hugging Face folder nor a model that the hub "
            f"has ({reason})"
        ) from error
    try:
        return _facts(config.get_text_config())
    except (AttributeError, TypeError, ValueError) as error:
        raise PreflightError(
            f"model.path={model_path}: model_type {config.model_type} is not supported "
            "(docs/models.md lists those that are): its config.json lacks the sizes of a decoder "
            f"({error})"
        ) from error


def _facts(text: PreTrainedConfig) -> ModelFacts:
    heads = text.num_attention_heads
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // heads
    key_values = text.to_dict().get("num_key_value_heads") or heads
    attention = text.hidden_size * head_dim * 2 * (heads + key_values)
    embedding = text.vocab_size * text.hidden_size
    num_embeddings = 1 if text.tie_word_embeddings else 2
    num_layers, mlps = text.num_hidden_layers, _mlp_parameters(text)
    active, experts = _expert_sizes(text)
    return ModelFacts(
        window_tokens=text.max_position_embeddings,
        hidden_size=text.hidden_size,
        num_heads=heads,
        num_parameters=num_layers * attention + mlps + num_embeddings * embedding,
        num_layers=num_layers,
        attention_size=heads * head_dim,
        key_value_size=key_values * head_dim,
        mlp_size=active,
        embedding_parameters=embedding,
        is_tied=bool(text.tie_word_embeddings),
        expert_parameters=experts,
    )


def _expert_sizes(text: PreTrainedConfig) -> tuple[int, int]:
    """Return the width of the MLPs that a token passes, and the parameters of a matrix of all
    experts of a layer: transformers keeps gate and up matrices of all experts as one parameter.
    """
    sizes = text.to_dict()
    num_experts = sizes.get("num_local_experts") or sizes.get("num_experts")
    if not num_experts:
        return text.intermediate_size, 0
    width = sizes.get("moe_intermediate_size") or text.intermediate_size
    shared = sizes.get("shared_expert_intermediate_size") or 0
    active = sizes.get("num_experts_per_tok", 1) * width + shared
    return active, 2 * num_experts * width * text.hidden_size


def _mlp_parameters(text: PreTrainedConfig) -> int:
    """Return the parameters of the MLPs of all layers, with every expert and the routers.

    transformers has no common names for the sizes of experts: these are the names of the Qwen, OLMo
    and Mixtral families.
    """
    sizes = text.to_dict()
    num_layers, dense = text.num_hidden_layers, 3 * text.hidden_size * text.intermediate_size
    num_experts = sizes.get("num_local_experts") or sizes.get("num_experts")
    if not num_experts:
        return int(num_layers * dense)
    width = sizes.get("moe_intermediate_size") or text.intermediate_size
    shared = sizes.get("shared_expert_intermediate_size") or 0
    sparse = text.hidden_size * (3 * (num_experts * width + shared) + num_experts)
    every, dense_layers = sizes.get("decoder_sparse_step") or 1, sizes.get("mlp_only_layers") or ()
    numbers = range(1, num_layers + 1)
    num_sparse = sum(i % every == 0 and i - 1 not in dense_layers for i in numbers)
    return int(num_sparse * sparse + (num_layers - num_sparse) * dense)
