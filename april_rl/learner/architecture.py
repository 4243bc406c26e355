"""What a model's architecture does beside its matrices, settled before any weight is loaded."""

from __future__ import annotations

from transformers import PreTrainedConfig

# Parts of the names of all settings that add noise while a model trains: attention_dropout,
# resid_pdrop, layerdrop, router_jitter_noise, ...
_NOISE = ("drop", "jitter")


def silence(config: PreTrainedConfig) -> None:
    """Set every dropout and every router noise of a model's configuration to 0, in place.

    A log-probability with noise makes no importance ratio, and activation checkpointing puts the
    model into training mode, where transformers would apply them.
    """
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            silence(value)
        elif any(part in key for part in _NOISE) and type(value) in (int, float):
            setattr(config, key, 0.0)
