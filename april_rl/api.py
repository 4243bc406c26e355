"""Names for scripts and modules of yours: `from april_rl.api import train, StepResult`.

A name is imported from its module when it is first asked for, so that a reward or an environment,
which every one of its processes imports, loads nothing that it does not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from april_rl.errors import RunError as RunError
    from april_rl.start.python import TrainedRun as TrainedRun
    from april_rl.start.python import evaluate as evaluate
    from april_rl.start.python import train as train
    from april_rl.task.data.samplers import Sampler as Sampler
    from april_rl.task.environments.protocol import Context as Context
    from april_rl.task.environments.protocol import StepResult as StepResult
    from april_rl.task.environments.protocol import ToolCall as ToolCall
    from april_rl.task.environments.protocol import Turn as Turn
    from april_rl.training.algorithm.losses import LossInputs as LossInputs
    from april_rl.training.algorithm.losses import TokenLoss as TokenLoss
    from april_rl.training.rollout.collector import Collector as Collector
    from april_rl.training.rollout.dispatch import RequestRules as RequestRules
    from april_rl.training.rollout.in_process import SerialEngines as SerialEngines
    from april_rl.training.rollout.step import StepRules as StepRules
    from april_rl.training.rollout.ticks import Completions as Completions
    from april_rl.training.rollout.ticks import Tick as Tick
    from april_rl.trl import with_partial_rollouts as with_partial_rollouts
    from april_rl.types import Completion as Completion
    from april_rl.types import Prompt as Prompt
    from april_rl.types import Sample as Sample
    from april_rl.types import Score as Score
    from april_rl.types import ScoredGroup as ScoredGroup

_MODULES = {
    "errors": ("RunError",),
    "start.python": ("TrainedRun", "evaluate", "train"),
    "task.data.samplers": ("Sampler",),
    "task.environments.protocol": ("Context", "StepResult", "ToolCall", "Turn"),
    "training.algorithm.losses": ("LossInputs", "TokenLoss"),
    "training.rollout.collector": ("Collector",),
    "training.rollout.dispatch": ("RequestRules",),
    "training.rollout.in_process": ("SerialEngines",),
    "training.rollout.step": ("StepRules",),
    "training.rollout.ticks": ("Completions", "Tick"),
    "trl": ("with_partial_rollouts",),
    "types": ("Completion", "Prompt", "Sample", "Score", "ScoredGroup"),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> object:
    """Import a name from its module."""
    for module, names in _MODULES.items():
        if name in names:
            return vars(import_module(f"april_rl.{module}"))[name]
    raise AttributeError(f"module april_rl.api has no {name}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
