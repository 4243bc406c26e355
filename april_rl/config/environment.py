"""Settings of environments, which reply to the turns of a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from april_rl.config.checks import check_bounds, require, require_function, within
from april_rl.config.choices import OnRestart


@dataclass(slots=True, kw_only=True)
class EnvironmentConfig:
    """The environment of the data sets with `environment: true`."""

    # module:Class, with an instance for each sample; or module:NAME of a function, or of a list of
    # functions, that the policy may call as tools; or of a coroutine function (client, row, seed)
    # -> reward or None: an agent that talks to the policy through a client of the package openai
    function: str | None = None
    # in place of function: the command of a program that is an agent; it finds OPENAI_BASE_URL and
    # the row in its environment variables
    command: str | None = None
    # address of this machine where agents reach the policy; the default serves only agents on this
    # machine, another address also containers and machines that can reach it
    address: str = "127.0.0.1"
    # keyword arguments of the class or the function
    args: dict[str, Any] = field(default_factory=dict)
    # data columns that `reset` gets in addition to prompt, answer and data set
    columns: list[str] = field(default_factory=list)
    max_turns: int = within(">= 1", 10)  # turns of an episode; the last one is answered too
    # limit of all that an environment says in an episode, including the chat template around it
    max_observation_tokens: int = within(">= 0", 1024)
    step_timeout_s: float = within("> 0", 60.0)  # limit of one call of `reset` or `step`
    # what happens to unfinished episodes when a run is resumed or their process has ended
    on_restart: OnRestart = OnRestart.replay
    num_processes: int = within(">= 1", 2)  # processes that share the environments

    def __post_init__(self) -> None:
        check_bounds("environment", self)
        if self.function:
            form = "module:Class or module:function"
            require_function("environment.function", self.function, form=form)
        require(bool(self.address), "environment.address is empty; 127.0.0.1 is this machine only")
        require(
            not (self.function and self.command),
            "environment.function and environment.command: an episode has one of them; set the "
            "other to null",
        )
        require(
            not (self.command and self.args),
            "environment.args are keyword arguments, and environment.command takes none: write "
            "them into the command",
        )

    @property
    def is_set(self) -> bool:
        return bool(self.function or self.command)

    @property
    def setting(self) -> str:
        """Return the setting that names it, for messages."""
        name = "function" if self.function else "command"
        return f"environment.{name}={getattr(self, name)}"
