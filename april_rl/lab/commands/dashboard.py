"""`python -m april_rl dashboard`: save or print a W&B dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec

from april_rl.errors import RunError

_USAGE = """usage: python -m april_rl dashboard entity=NAME [project=NAME] [kind=sweep] [--print]

  python -m april_rl dashboard entity=my-team                 a view of runs, saved to W&B
  python -m april_rl dashboard entity=my-team kind=sweep      a view of a sweep over α
  python -m april_rl dashboard kind=sweep --print             its JSON; needs no key and no network

entity is your W&B user or team; the project is april_rl unless given (tracking.project of the
runs). Saving needs `wandb login` or WANDB_API_KEY, and makes a new view each time."""
_PRINT = "--print"
_DEFAULTS = {"entity": "", "project": "april_rl", "kind": "run"}


def main(arguments: Sequence[str]) -> int:
    """Save or print a dashboard and return the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    is_printed = _PRINT in arguments
    settings = _DEFAULTS | dict(map(_setting, (each for each in arguments if each != _PRINT)))
    if not settings["entity"] and not is_printed:
        raise RunError("entity is missing: give entity=NAME, your W&B user or team, or --print")
    if find_spec("wandb_workspaces") is None:
        raise RunError(
            "dashboard needs the package wandb-workspaces: pip install 'wandb-workspaces>=0.4.13'"
        )
    from april_rl.lab.dashboards.dashboard import KINDS, dashboard, save, spec

    kind, entity, project = settings["kind"], settings["entity"], settings["project"]
    if kind not in KINDS:
        raise RunError(f"kind={kind} is not a kind of dashboard: it must be {' or '.join(KINDS)}")
    view = dashboard(kind, entity=entity, project=project)
    print(spec(view) if is_printed else f"dashboard: {save(view)}")
    return 0


def _setting(argument: str) -> tuple[str, str]:
    key, _, value = argument.partition("=")
    if key in _DEFAULTS and value:
        return key, value
    if key in _DEFAULTS:
        raise RunError(f"{key} has no value: write {key}=NAME")
    near = get_close_matches(key, [*_DEFAULTS, _PRINT], n=1)
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(_DEFAULTS)} and {_PRINT}"
    raise RunError(f"{argument} is not an argument of dashboard; {hint}")
