"""Commands besides training, one module each: `python -m april_rl NAME ...` runs them.

A command is a module with `SUMMARY`, one line for the list, and `main(arguments)`, which returns
the exit status. Heavy imports belong inside `main`, because the list imports every command. To add
one, write a module here or in `april_rl/lab/commands`, and add it to `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

_LAB = "april_rl.lab.commands"
# In the order of the list.
_MODULES = {
    "evaluate": f"{__name__}.evaluate",
    "rehearse": f"{_LAB}.rehearse",
    "profile": f"{_LAB}.profile",
    "data": f"{_LAB}.data",
    "simulate": f"{_LAB}.simulate",
    "checkpoint": f"{__name__}.checkpoint",
    "dashboard": f"{_LAB}.dashboard",
    "report": f"{_LAB}.report",
    "compare": f"{_LAB}.compare",
}


class Command(NamedTuple):
    """The summary of a command and its main function."""

    summary: str
    main: Callable[[Sequence[str]], int]


def commands() -> dict[str, Command]:
    """Return the commands by name."""
    return {name: _command(import_module(module)) for name, module in _MODULES.items()}


def _command(module: ModuleType) -> Command:
    return Command(summary=module.SUMMARY, main=module.main)
