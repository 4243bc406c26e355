"""Assumptions of a rehearsal: the machine, the length of responses, and intended findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from april_rl.config import TrainConfig
from april_rl.errors import RunError
from april_rl.lab.simulator.calibration import Calibration

NAMES = ("gpu_gib", "mean_response_tokens", "accept", "calibration")


class AssumptionError(RunError):
    """An argument of `rehearse` has an invalid value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Arguments of a rehearsal in addition to the recipe."""

    gpu_gib: float = 80.0  # memory of one GPU, for the memory plan
    mean_response_tokens: float = 0.0  # 0: half of rollout.max_response_tokens
    accept: tuple[str, ...] = ()  # names of findings that are intended
    calibration: Calibration | None = None  # measured on the GPU; None: data sheets and estimates

    @classmethod
    def of(cls, arguments: Sequence[str]) -> tuple[Self, list[str]]:
        """Return the assumptions among the arguments `KEY=VALUE`, and the other arguments. Raise
        AssumptionError for a number that is not above 0, CalibrationError for a bad calibration.
        """
        given = dict(word.split("=", 1) for word in arguments if word.partition("=")[0] in NAMES)
        others = [word for word in arguments if word.partition("=")[0] not in NAMES]
        file = given.pop("calibration", "")
        numbers = {key: _positive(key, text) for key, text in given.items() if key != "accept"}
        accept = given.get("accept", "").strip("[]").replace(" ", "").split(",")
        calibration = Calibration.read(Path(file)) if file else None
        chosen = tuple(filter(None, accept))
        return cls(**numbers, accept=chosen, calibration=calibration), others

    def response_tokens(self, config: TrainConfig) -> float:
        """Return the expected mean length of a response: as given, or half of the budget."""
        return self.mean_response_tokens or config.rollout.max_response_tokens / 2


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise AssumptionError(f"{key} must be a number > 0, got {text}")
    return value
