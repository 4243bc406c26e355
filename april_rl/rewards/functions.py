"""The reward functions of a run, as its settings say them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from april_rl.config.task import RewardConfig

MATH_VERIFY = "math_verify"

# Where `build(context, **args)` of each built-in is. Reward processes import it, nobody else.
BUILTIN_MODULES = {
    MATH_VERIFY: "april_rl.rewards.builtin.math",
    "exact": "april_rl.rewards.builtin.exact",
    "last_number": "april_rl.rewards.builtin.last_number",
    "format": "april_rl.rewards.builtin.format",
    "length": "april_rl.rewards.builtin.length",
    "code": "april_rl.rewards.builtin.code",
    "judge": "april_rl.rewards.builtin.judge",
    "reward_model": "april_rl.rewards.builtin.reward_model",
    "reasoning_gym": "april_rl.rewards.builtin.reasoning_gym",
}
# Built-ins that gain from all responses of a group in one call; the user's functions always get it.
_SCORE_GROUPS = {"judge", "reward_model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One reward function, as the settings say it."""

    name: str  # in reward.functions; of the only one, what it is
    key: str  # the setting, for messages
    function: str  # a built-in, or module:function
    weight: float = 1.0
    datasets: frozenset[str] | None = None  # the sets it scores; None: all
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def wants_group(self) -> bool:
        """Whether it is called when the whole group is finished, and not for each sample."""
        return self.function not in BUILTIN_MODULES or self.function in _SCORE_GROUPS

    def scores(self, dataset: str) -> bool:
        """Return whether responses to prompts of that set get its value."""
        return self.datasets is None or dataset in self.datasets

    def __str__(self) -> str:
        return f"{self.key}={self.function}"


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


def chosen_for(
    functions: Iterable[RewardFunction], dataset: str, *, whole_groups: bool
) -> tuple[RewardFunction, ...]:
    """Return those that score a data set, of those that want whole groups or of the others."""
    return tuple(f for f in functions if f.scores(dataset) and f.wants_group == whole_groups)
