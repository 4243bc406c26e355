"""Check that a run can resume from a checkpoint before anything in its directory is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import try_to_load_from_cache

from april_rl.config import TrainConfig
from april_rl.config.choices import Kl, OnRestart
from april_rl.errors import RunError
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.rollout.codec import check_observations, check_state

_SIZES = ("hidden_size", "num_layers", "num_heads", "num_parameters")
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 8  # number of samples that are hashed from each file of weights


class OtherModelError(RunError):
    """The model of a run is not the one that its checkpoint was written for."""


def model_identity(config: TrainConfig, sizes: ModelSizes) -> dict[str, Any]:
    """Return what must stay the same when a run resumes: the sizes of the model, its adapters,
    and a fingerprint of its frozen weights, which no checkpoint holds. The weights below adapters
    and the KL reference are frozen. The fingerprint is None if every weight is trained.
    """
    lora = config.lora
    has_frozen = lora.rank is not None or config.algorithm.kl is not Kl.none
    return {
        **{name: getattr(sizes, name) for name in _SIZES},
        "lora_rank": lora.rank,
        "lora_target_modules": lora.target_modules,
        "lora_alpha": lora.alpha,
        "weights": _fingerprint(config.model.path) if has_frozen else None,
    }


def check_resume(config: TrainConfig, state: dict[str, Any], *, model: dict[str, Any]) -> None:
    """Raise RunError unless a run with these settings and this `model_identity` can resume from a
    checkpoint's `state`. The prompt stream compares seed and data when it is restored.
    """
    rollout = config.rollout
    check_state(
        state["collector"],
        num_groups=config.trainer.num_groups,
        group_size=rollout.group_size,
        max_staleness=rollout.max_staleness,
        max_response_tokens=rollout.max_response_tokens,
    )
    if config.environment.is_set and config.environment.on_restart is OnRestart.replay:
        limit = config.environment.max_observation_tokens
        check_observations(state["collector"], max_observation_tokens=limit)
    saved = state["base"]
    for name in _SIZES:
        if saved[name] != model[name]:
            raise OtherModelError(
                f"model.path={config.model.path} has {name} {model[name]}, but the model of the "
                f"checkpoint has {saved[name]}: resume with that model"
            )
    for name in ("lora_rank", "lora_target_modules", "lora_alpha"):
        before = saved[name] or None  # earlier versions wrote a rank of 0 for no adapters
        if before != model[name]:
            key = name.replace("_", ".", 1)
            raise OtherModelError(
                f"{key}={_format(model[name])}, but the saved run had {_format(before)}, and "
                "its weights fit only that: resume with the same value"
            )
    if None not in (weights := (model["weights"], saved["weights"])) and len({*weights}) > 1:
        raise OtherModelError(
            f"model.path={config.model.path} has other weights than the model that the checkpoint "
            "was trained from, and the checkpoint lacks the frozen ones: resume with that model"
        )


def _format(value: object) -> str:
    """Return the value of a setting as a command line writes it."""
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return "null" if value is None else f"{value:g}"


def _fingerprint(model_path: str) -> str:
    """Return the commit of a hub model, or for a folder a hash over the size, the header and
    samples of its weights: hashing all bytes of a large model would take minutes.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model_path, "config.json")
        return Path(cached).parent.name if isinstance(cached, str) else model_path
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(number * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
