"""Assumptions about machine and responses, given as arguments of `plan` and `rehearse`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from april_rl.config import TrainConfig
from april_rl.errors import RunError
from april_rl.lab.simulator.calibration import Calibration
from april_rl.lab.simulator.length_distributions import (
    LengthDistribution,
    Lognormal,
    Recorded,
    median_for,
)
from april_rl.lab.simulator.turns import NUMBERS, Turns
from april_rl.task.evaluation.settings import set_sampling

_NUMBERS = (
    *("gpu_gib", "mean_response_tokens", "sigma", "prompt_tokens", "score_s"),
    "evaluation_prompts",
)
NAMES = (*_NUMBERS, *NUMBERS, "accept", "calibration")
_CORRELATION = 0.3  # correlation of the lengths in a group; docs/experiments.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumptions about machine, prompts and responses, which settings do not contain."""

    gpu_gib: float = 79.2  # memory of one GPU, for the memory plan of a rehearsal
    mean_response_tokens: float = 0.0  # 0: half of rollout.max_response_tokens
    sigma: float = 0.6  # deviation of the logarithm of a response's length
    prompt_tokens: float = 256.0  # of a prompt; at most data.max_prompt_tokens
    lengths: Recorded | None = None  # recorded lengths in place of lognormal ones
    score_s: float = 0.0  # seconds from the end of a sample to its reward
    evaluation_prompts: float = 0.0  # of a held-out set whose number no setting limits
    turns: Turns | None = None  # None: a response is one turn
    accept: tuple[str, ...] = ()  # names of findings that are intended
    calibration: Calibration | None = None  # measured on the GPU; None: data sheets and estimates

    @classmethod
    def of(cls, arguments: Sequence[str]) -> tuple[Self, list[str]]:
        """Return the assumptions among the arguments `KEY=VALUE`, and the other arguments. Raise
        RunError for a number that is not above 0, turns that cannot be simulated and a bad
        calibration.
        """
        given = dict(word.split("=", 1) for word in arguments if word.partition("=")[0] in NAMES)
        others = [word for word in arguments if word.partition("=")[0] not in NAMES]
        known = {k: positive(k, v) for k, v in given.items() if k in (*_NUMBERS, *NUMBERS)}
        numbers: dict[str, Any] = {k: known[k] for k in _NUMBERS if k in known}
        try:
            turns = Turns.of({k: known[k] for k in NUMBERS if k in known})
        except ValueError as error:
            raise RunError(str(error)) from error
        accept = given.get("accept", "").strip("[]").replace(" ", "").split(",")
        file = given.get("calibration")
        calibration = Calibration.read(Path(file)) if file else None
        chosen = tuple(filter(None, accept))
        return cls(**numbers, turns=turns, accept=chosen, calibration=calibration), others

    def response_tokens(self, config: TrainConfig) -> float:
        """Return the expected mean length of a response: as given, or half of the budget."""
        budget = config.rollout.max_response_tokens
        return min(self.mean_response_tokens or budget / 2, 0.95 * budget)

    def length_of(self, config: TrainConfig) -> LengthDistribution:
        """Return the lengths: recorded ones, or lognormal ones with the expected mean."""
        if self.lengths is not None:
            return self.lengths
        median = median_for(
            self.response_tokens(config), sigma=self.sigma, cap=config.rollout.max_response_tokens
        )
        return Lognormal(median_tokens=median, sigma=self.sigma, correlation=_CORRELATION)

    def evaluated_responses(self, config: TrainConfig) -> int:
        """Return the responses of an evaluation of all sets."""
        sets = [set_sampling(config, chosen) for chosen in config.evaluation.sets.values()]
        found = sum((s.max_prompts or self.evaluation_prompts) * s.num_samples for s in sets)
        return round(found)

    def lengths_in_words(self, config: TrainConfig) -> str:
        """Return the lengths in words, for the user."""
        why = "mean_response_tokens" if self.mean_response_tokens else "assumed: half of the budget"
        words = f"lognormal responses, mean {self.response_tokens(config):,.0f} tokens ({why})"
        if self.lengths is not None:
            words = f"{sum(map(len, self.lengths.groups)):,} recorded responses"
        if turns := self.turns:
            words += (
                f" in {turns.num_turns} turns with calls of {turns.tool_s:g} s that add "
                f"{turns.observation_tokens:,} tokens"
            )
        elif config.environment.is_set:
            words += " in one turn (the run has an environment: give turns, tool_s and so on)"
        return words

    def tokens_of_prompt(self, config: TrainConfig) -> float:
        return min(self.prompt_tokens, config.data.max_prompt_tokens)


def positive(key: str, text: str) -> float:
    """Return the number of an argument; raise RunError if it is not above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise RunError(f"{key} must be a number > 0, got {text}")
    return value
