"""Turns a setting into environments, in their process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from april_rl.environments.protocol import Context, Environment, Loads
from april_rl.rewards.loading import check_args, wanted
from april_rl.rewards.plugins import import_function


def load_class(function: str, args: Mapping[str, Any]) -> type[Any]:
    """Import the class of a setting `module:Class`. Raise TypeError if it is no environment or does
    not take `args`, and whatever its module raises.
    """
    found = import_function(function)
    if not inspect.isclass(found):
        raise TypeError(f"{function} is no class; an environment has one instance per sample")
    missing = [name for name in ("reset", "step") if not callable(vars_of(found).get(name))]
    if missing:
        raise TypeError(f"{function} has no method {' and '.join(missing)}")
    check_args(found, args, num_given=0)
    if absent := wanted(found, args, num_given=0):
        raise TypeError(f"needs the argument {' and '.join(absent)}")
    return found


def new_environment(function: str, args: Mapping[str, Any], context: Context) -> Environment:
    """Return a new instance, ready for `reset`."""
    made = load_class(function, args)(**args)
    if isinstance(made, Loads):
        made.load(context)
    assert isinstance(made, Environment)
    return made


def vars_of(found: type[Any]) -> dict[str, Any]:
    """Return the attributes of a class, inherited ones too."""
    return {name: value for base in reversed(found.__mro__) for name, value in vars(base).items()}
