"""Checks before training starts: the machine, the model, its context length. Everything that is
missing is in one message.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from huggingface_hub import constants
from transformers import AutoConfig

from april_rl.errors import RunError
from april_rl.learner.model.sizes import ModelSizes
from april_rl.runtime.engine_build import installed_engines, wrong_engine
from april_rl.supervision.host_memory import host_memory

if TYPE_CHECKING:  # the acceptance tool looks at a machine where Hydra may be broken
    from april_rl.config.choices import RouterReplay

_GIB = 1 << 30


# What vLLM copies past the loaders that a reload replaces (its models/gpt_oss.py).
_NEVER_NEW = {"gpt_oss": "attention sinks and experts"}


class PreflightError(RunError):
    """The run cannot start on this machine with these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Limits of a model, from its config.json."""

    window_tokens: int  # longest context, prompt and response
    num_heads: int  # of attention


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


def check_engine_takes(model: ModelSizes, *, prefix_caching: bool, is_training: bool) -> None:
    """Raise PreflightError where vLLM 0.32 samples wrongly from a model, or fails after a while."""
    kind = model.model_type
    if is_training and kind in _NEVER_NEW:
        raise PreflightError(
            f"model.path: model_type {kind} cannot be trained: vLLM 0.32 keeps its first "
            f"{_NEVER_NEW[kind]} when new weights are sent. It can be evaluated"
        )
    if model.has_states and prefix_caching:
        raise PreflightError(
            f"engine.prefix_caching=true: model_type {kind} has layers that carry a state, which "
            "vLLM's prefix cache does not support everywhere; set engine.prefix_caching=false"
        )


def check_router_replay(model: ModelSizes, replay: RouterReplay) -> None:
    """Raise PreflightError when the learner knows no router in a model whose experts it shall
    repeat.
    """
    if model.has_known_routers or not replay.is_on:
        return
    raise PreflightError(
        f"learner.router_replay={replay.value}: model_type {model.model_type} has no router whose "
        "choices the learner can repeat (docs/usage.md names the families); remove it"
    )


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
    text = config.get_text_config()
    try:
        return ModelFacts(
            window_tokens=text.max_position_embeddings, num_heads=text.num_attention_heads
        )
    except AttributeError as error:
        raise PreflightError(
            f"model.path={model_path}: model_type {config.model_type} is not supported "
            "(docs/models.md lists those that are): its config.json lacks the sizes of a decoder "
            f"({error})"
        ) from error
