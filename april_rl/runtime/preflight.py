"""What can be known before training starts: the machine, the model, its window. One message for all
of it.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from huggingface_hub import constants
from transformers import AutoConfig, PreTrainedConfig

from april_rl.errors import RunError

_GIB = 1 << 30
# float32 master, gradient and two Adam moments in the learner; the engine's own 16-bit copy beside
# it.
_BYTES_PER_PARAMETER = 16 + 2


class PreflightError(RunError):
    """The run cannot start on this machine with these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's config.json says."""

    window_tokens: int
    hidden_size: int
    num_parameters: int  # of a dense decoder, from the sizes of its matrices


def num_gpus() -> int:
    """GPUs of this machine, by their device files: asking CUDA would start it in the controller."""
    nvidia = [p for p in Path("/dev").glob("nvidia*") if p.name[len("nvidia") :].isdigit()]
    return len(nvidia) or len(list(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/mem_banks/0")))


def pick_device(wanted: str) -> str:
    """`cpu` or `cuda` (ROCm too) for runtime.device; `auto` takes a GPU where there is one."""
    if wanted == "auto":
        return "cuda" if num_gpus() else "cpu"
    return "cpu" if wanted == "cpu" else "cuda"


def check_supported(*, tensor_parallel_size: int, offload: str) -> None:
    """Raise PreflightError for a setting that has a name but no effect yet."""
    if tensor_parallel_size != 1:
        raise PreflightError(
            f"engine.tensor_parallel_size={tensor_parallel_size}: only 1 is supported as yet"
        )
    if offload != "none":
        raise PreflightError(f"learner.offload={offload}: only none is supported as yet")


def check_start(
    *,
    model_path: str,
    device: str,
    num_workers: int,
    is_cluster: bool,
    window_tokens: int,
    window_key: str,
    reference_bytes: int,
) -> ModelFacts:
    """The model's facts, when everything the run needs before its data is there.

    `window_tokens`: prompt and response tokens a sample may have, by the setting `window_key`. With
    `is_cluster` the GPUs are elsewhere and Ray counts them. `reference_bytes`: a parameter of the
    frozen copy of the model, 0 without one. Raises PreflightError with every missing thing in one
    message.
    """
    per_parameter = _BYTES_PER_PARAMETER + reference_bytes
    missing = []
    if device == "cuda" and not is_cluster and num_gpus() < num_workers:
        missing.append(
            f"GPUs: runtime.num_workers={num_workers} wants as many, this machine has {num_gpus()}"
        )
    facts = None
    without_network_go_offline()
    try:
        facts = model_facts(model_path)
    except PreflightError as error:
        missing.append(f"model: {error}")
        missing += _too_small_by_name(model_path, per_parameter)
    if facts is not None:
        missing += _too_short(facts, window_tokens, window_key)
        if device == "cpu":
            missing += _no_memory(facts.num_parameters, per_parameter)
    if missing or facts is None:
        lines = "\n".join(f"  - {line}" for line in missing)
        raise PreflightError(f"this run cannot start here; it misses\n{lines}")
    return facts


def _too_short(facts: ModelFacts, window_tokens: int, window_key: str) -> list[str]:
    """What to say when the model reads fewer tokens than a sample may have."""
    if window_tokens <= facts.window_tokens:
        return []
    return [f"window: {window_key} = {window_tokens}, the model reads {facts.window_tokens} tokens"]


def _too_small_by_name(model_path: str, per_parameter: int) -> list[str]:
    """The size of a model that is not here may stand in its name: 4B, 0.6B."""
    size = re.search(r"(\d+(?:\.\d+)?)B(?![a-z])", model_path)
    return _no_memory(float(size[1]) * 1e9, per_parameter, " (by its name)") if size else []


def _no_memory(num_parameters: float, per_parameter: int, how: str = "") -> list[str]:
    """What to say when this machine's free memory does not hold the training state."""
    needed = num_parameters * per_parameter
    free = _free_bytes()
    if needed <= free:
        return []
    return [
        f"memory: {num_parameters / 1e9:.1f} billion parameters{how} train in about "
        f"{needed / _GIB:.0f} GiB, and this machine has {free / _GIB:.0f} GiB free"
    ]


def _free_bytes() -> int:
    return int(psutil.virtual_memory().available)


def without_network_go_offline() -> None:
    """Tell Hugging Face's libraries when their hub is out of reach: they would retry long.

    They read the variable when they are imported, and so do worker processes.
    """
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(hub, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        constants.HF_HUB_OFFLINE = True


def model_facts(model_path: str) -> ModelFacts:
    """Read config.json; raises PreflightError naming model.path when there is none, or one without
    the sizes of a dense decoder.
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PreflightError(
            f"model.path={model_path} is neither a Hugging Face folder nor a model "
            f"the hub gives ({reason})"
        ) from error
    try:
        return _facts(config.get_text_config())
    except (AttributeError, TypeError, ValueError) as error:
        raise PreflightError(
            f"model.path={model_path}: model_type {config.model_type} is not supported: its "
            f"config.json does not give the sizes of a dense decoder ({error})"
        ) from error


def _facts(text: PreTrainedConfig) -> ModelFacts:
    """From the configuration of a decoder for text."""
    heads = text.num_attention_heads
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // heads
    key_values = text.to_dict().get("num_key_value_heads") or heads
    layer = text.hidden_size * (head_dim * 2 * (heads + key_values) + 3 * text.intermediate_size)
    embeddings = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    return ModelFacts(
        window_tokens=text.max_position_embeddings,
        hidden_size=text.hidden_size,
        num_parameters=text.num_hidden_layers * layer + embeddings,
    )
