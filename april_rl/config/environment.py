"""Settings of environments, which answer the turns of a sample."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from april_rl.config.checks import check_bounds, require, within
from april_rl.config.choices import OnRestart

_CLASS = re.compile(r"[\w.]+:\w+")


@dataclass(slots=True, kw_only=True)
class EnvironmentConfig:
    """The environment of the data sets with `environment: true`."""

    function: str = ""  # module:Class, one instance for each sample; empty: there is none
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the class
    # data columns that `reset` gets, besides prompt, answer and data set
    columns: list[str] = field(default_factory=list)
    max_turns: int = within(">= 1", 10)  # of an episode; the last one is answered, too
    # of all that an environment says in an episode, with the chat template around it
    max_observation_tokens: int = within(">= 0", 1024)
    step_timeout_s: float = within("> 0", 60.0)  # for one call of `reset` or `step`
    # episodes under way in a resumed run, or whose process has ended, are built again by their
    # turns; or, with again, begin anew in a resumed run, and are dropped when their process ends
    on_restart: OnRestart = OnRestart.replay
    num_processes: int = within(">= 1", 2)  # processes that share the environments
    start_timeout_s: float = within("> 0", 60.0)  # for a process to start and load the class
    memory_gib: float = within(">= 1", 4.0)  # address space of one process, libraries included

    def __post_init__(self) -> None:
        check_bounds("environment", self)
        require(
            not self.function or _CLASS.fullmatch(self.function) is not None,
            f"environment.function must be module:Class, got {self.function}",
        )
