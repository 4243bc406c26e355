"""GPU speeds and memory measured by `tools/gpu_acceptance.py`, read from calibration.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from april_rl.errors import RunError
from april_rl.lab.simulator.gpu_kinds import GpuKind, Rates

# The smallest and the largest value that can be a measurement. A value in another unit, such as
# GB/s, is far outside.
_LIMITS = {
    "decode_bytes_per_s": (1e8, 1e14),
    "between_steps_s": (0.0, 1.0),
    "prefill_flops_per_s": (1e8, 1e17),
    "update_flops_per_s": (1e8, 1e17),
    "sync_bytes_per_s": (1e6, 1e13),
    "asleep_gib": (0.0, 40.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of one GPU; each replaces an assumption of a prediction."""

    device: str
    decode_bytes_per_s: float  # weights, keys and values that decoding reads in a second
    between_steps_s: float  # the part of an engine step that depends on neither bytes nor tokens
    prefill_flops_per_s: float
    update_flops_per_s: float  # model FLOPs of the learner
    sync_bytes_per_s: float  # weights that go from the learner into the engine in a second
    asleep_gib: float  # memory that a sleeping engine with CUDA graphs keeps

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the measurements in a file; raise RunError if they cannot be right."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"calibration={path} cannot be read: {error}") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            raise RunError(
                f"calibration={path} must be an object with {', '.join(names)}, as "
                "tools/gpu_acceptance.py writes it"
            )
        for name, (least, most) in _LIMITS.items():
            value = found[name]
            if not isinstance(value, int | float) or not least <= value <= most:
                raise RunError(
                    f"{name} in calibration={path} must be a number from {least:g} to {most:g}, "
                    f"got {value}; measure it again with tools/gpu_acceptance.py"
                )
        return cls(**found)

    def rates(self, kind: GpuKind) -> Rates:
        """Return the measured speeds; what was not measured is of the GPU's data sheet."""
        return replace(
            kind.rates(),
            read_bytes_per_s=self.decode_bytes_per_s,
            prefill_flops_per_s=self.prefill_flops_per_s,
            update_flops_per_s=self.update_flops_per_s,
            sync_bytes_per_s=self.sync_bytes_per_s,
            layer_s=0.0,  # a part of what was measured between two steps
            between_steps_s=self.between_steps_s,
        )
