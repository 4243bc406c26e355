"""Reads what config.json says about a model."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from huggingface_hub import constants
from transformers import AutoConfig, PreTrainedConfig

from april_rl.errors import PreflightError
from april_rl.start.planning.model_folder import check_model_folder


def read_model(model_path: str, *, key: str = "model.path") -> PreTrainedConfig:
    """Return a model's config.json; raise PreflightError naming `key` if it is not a decoder's."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        check_model_folder(model_path, key=key, may_be_on_hub=False)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = "; the hub is out of reach or HF_HUB_OFFLINE is set: give a local folder"
        raise PreflightError(
            f"{key}={model_path} is neither a Hugging Face folder nor a model that the hub "
            f"has ({reason}){offline if constants.HF_HUB_OFFLINE else ''}"
        ) from error
    try:
        max_context_tokens(config), num_heads(config)
    except AttributeError as error:
        raise PreflightError(
            f"{key}={model_path}: model_type {config.model_type} is not supported "
            "(docs/models.md lists supported types): its config.json lacks the sizes of a decoder "
            f"({error})"
        ) from error
    return config


def max_context_tokens(config: PreTrainedConfig) -> int:
    """Return the longest context that the model reads, prompt and response."""
    return int(config.get_text_config().max_position_embeddings)


def num_heads(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().num_attention_heads)


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
