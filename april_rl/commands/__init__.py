"""Commands beside training, one module each: what `python -m april_rl NAME ...` runs.

A command is a module of this folder with `SUMMARY`, one line for the list, and `main(arguments)`,
which returns the exit status. It imports what is heavy inside `main`: the list imports every
command. A new one is a module here and a name in `NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

# In the order of the list; a name without a module is left out.
NAMES = ("evaluate", "rehearse", "data", "simulate", "checkpoint", "dashboard", "report", "compare")


class Command(NamedTuple):
    """What the list shows of a command, and how it is run."""

    summary: str
    main: Callable[[Sequence[str]], int]


def commands() -> dict[str, Command]:
    """Return the commands there are, by name."""
    return {name: _command(name) for name in NAMES if find_spec(f"{__name__}.{name}")}


def _command(name: str) -> Command:
    module = import_module(f"{__name__}.{name}")
    return Command(summary=module.SUMMARY, main=module.main)
