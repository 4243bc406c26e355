"""Commands besides training, one module each: `python -m april_rl NAME ...` runs them.

A command is a module of this folder with `SUMMARY`, one line for the list, and `main(arguments)`,
which returns the exit status. Heavy imports belong inside `main`, because the list imports every
command. To add one, write a module here and add its name to `NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

# In the order of the list; a name without a module is left out.
NAMES = (
    "evaluate",
    "rehearse",
    "profile",
    "data",
    "simulate",
    "checkpoint",
    "dashboard",
    "report",
    "compare",
)


class Command(NamedTuple):
    """The summary of a command and its main function."""

    summary: str
    main: Callable[[Sequence[str]], int]


def commands() -> dict[str, Command]:
    """Return the available commands by name."""
    return {name: _command(name) for name in NAMES if find_spec(f"{__name__}.{name}")}


def _command(name: str) -> Command:
    module = import_module(f"{__name__}.{name}")
    return Command(summary=module.SUMMARY, main=module.main)
