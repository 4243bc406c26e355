"""Whether a run can go on from a checkpoint, before anything in its directory is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import try_to_load_from_cache

from april_rl.config import TrainConfig
from april_rl.config.choices import Kl
from april_rl.errors import RunError
from april_rl.rollout.codec import check_state

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 8  # of each file of weights


class OtherBaseError(RunError):
    """The frozen weights of a run are not those that its checkpoint was trained beside."""


def frozen_base(config: TrainConfig) -> dict[str, Any] | None:
    """Return what tells the frozen weights of a run from others: those below adapters and those of
    the KL reference, which no checkpoint holds. None where every weight is trained.
    """
    if not config.lora.rank and config.algorithm.kl is Kl.none:
        return None
    return {"weights": _fingerprint(config.model.path), "lora_alpha": config.lora.alpha}


def check_resume(
    config: TrainConfig, state: dict[str, Any], *, base: dict[str, Any] | None
) -> None:
    """Raise RunError unless a run with these settings can go on from a checkpoint's `state`.

    Seed and data are compared by the prompt stream, when it is restored. `base` is what
    `frozen_base` returns.
    """
    rollout = config.rollout
    check_state(
        state["collector"],
        num_groups=config.trainer.num_groups,
        group_size=rollout.group_size,
        max_staleness=rollout.max_staleness,
        max_response_tokens=rollout.max_response_tokens,
    )
    saved = state["base"]
    if base is None or saved is None:
        return
    if base["weights"] != saved["weights"]:
        raise OtherBaseError(
            f"model.path={config.model.path} has other weights than the model that the checkpoint "
            "was trained on, whose frozen weights it does not hold: resume with that model"
        )
    if base["lora_alpha"] != saved["lora_alpha"]:
        raise OtherBaseError(
            f"lora.alpha={config.lora.alpha:g}, but the saved run had {saved['lora_alpha']:g}, "
            "which scales its adapters: resume with the same"
        )


def _fingerprint(model_path: str) -> str:
    """Return the commit of a hub model, or a hash over size, header and samples of a folder's
    weights: of all their bytes it would take minutes for a large model.
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
