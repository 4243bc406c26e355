"""The reward functions of a run, from its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from april_rl.config.task import BUILTIN_REWARDS, RewardConfig

MATH_VERIFY = "math_verify"

# Built-ins that are faster with a whole group in one call. A user's function always gets a group.
_SCORE_GROUPS = {"judge", "reward_model"}
_EXTRACT_ANSWERS = {"math_verify", "exact", "last_number", "reasoning_gym"}
_SHORT = {"exact", "format", "last_number", "length", "environment"}  # in one module
_IGNORE_ANSWERS = {"code", "environment", "format", "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One reward function as configured."""

    name: str  # the key in reward.functions; with reward.function, the function itself
    key: str  # the setting, for messages
    function: str  # a built-in, or module:function
    weight: float = 1.0
    datasets: frozenset[str] | None = None  # the sets that it scores; None: all
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def wants_group(self) -> bool:
        """Return whether it is called once for a whole finished group, not for each sample."""
        return self.function not in BUILTIN_REWARDS or self.function in _SCORE_GROUPS

    @property
    def extracts_answer(self) -> bool:
        """Return whether it is a built-in that compares the answer that a response states."""
        return self.function in _EXTRACT_ANSWERS

    @property
    def may_read_answer(self) -> bool:
        return self.function not in _IGNORE_ANSWERS

    def scores(self, dataset: str) -> bool:
        return self.datasets is None or dataset in self.datasets

    def __str__(self) -> str:
        return f"{self.key}={self.function}"


def builder_of(function: str) -> str:
    """Return `module:function` of what builds a built-in; only reward processes import it."""
    module, name = ("short", function) if function in _SHORT else (function, "build")
    return f"april_rl.task.rewards.builtin.{module}:{name}"


def reward_functions(reward: RewardConfig) -> tuple[RewardFunction, ...]:
    """Return the functions of a run, in the order of the settings."""
    if not reward.functions:
        only = RewardFunction(
            name=reward.function, key="reward.function", function=reward.function, args=reward.args
        )
        return (only,)
    return tuple(
        RewardFunction(
            name=name,
            key=f"reward.functions.{name}.function",
            function=chosen.function,
            weight=chosen.weight,
            datasets=None if chosen.sources is None else frozenset(chosen.sources),
            args=chosen.args,
        )
        for name, chosen in reward.functions.items()
    )


def keys_of(functions: Iterable[RewardFunction]) -> Iterator[str]:
    """Yield the environment variables with keys that the arguments of functions name, and those
    with which a reward model is read from the hub.
    """
    for function in functions:
        if isinstance(name := function.args.get("api_key_env"), str):
            yield name
        if function.function == "reward_model":
            yield from ("HF_TOKEN", "HF_TOKEN_PATH")
