"""`python -m april_rl dashboard`: the dashboards as W&B workspaces, saved or written as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

_USAGE = """usage: python -m april_rl dashboard entity=NAME [project=NAME] [kind=sweep] [--print]

  python -m april_rl dashboard entity=my-team                 save the dashboard of runs to W&B
  python -m april_rl dashboard entity=my-team kind=sweep      save that of a sweep over α
  python -m april_rl dashboard kind=sweep --print             print its JSON; needs no login

The project is april_rl unless given. Saving needs `wandb login`, and makes a new view
of the project each time."""

_DEFAULTS = {"entity": "", "project": "april_rl", "kind": "run"}


def main(arguments: Sequence[str]) -> int:
    """Save or print a dashboard and return the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    is_printed = "--print" in arguments
    given = dict(a.split("=", 1) for a in arguments if "=" in a)
    settings = {**_DEFAULTS, **given}
    unknown = [a for a in arguments if a != "--print" and a.partition("=")[0] not in _DEFAULTS]
    wrong = (
        (f"{unknown[0]} is not an argument" if unknown else "")
        or (f"kind={settings['kind']} must be run or sweep" * (settings["kind"] not in _KINDS))
        or ("give entity=NAME, your W&B user or team" * (not settings["entity"] and not is_printed))
    )
    if wrong:
        print(f"error: {wrong}\n{_USAGE}", file=sys.stderr)
        return 2
    if find_spec("wandb_workspaces") is None:
        print("error: needs the package wandb-workspaces==0.4.13: pip install it", file=sys.stderr)
        return 1
    return _make(settings["kind"], settings["entity"], settings["project"], is_printed=is_printed)


_KINDS = ("run", "sweep")


def _make(kind: str, entity: str, project: str, *, is_printed: bool) -> int:
    import json

    from april_rl.errors import RunError
    from april_rl.lab.dashboards.dashboard import plain, run_dashboard, save, sweep_dashboard

    build = run_dashboard if kind == "run" else sweep_dashboard
    workspace = build(entity=entity, project=project)
    if is_printed:
        print(json.dumps(plain(workspace), indent=1))
        return 0
    try:
        print(f"dashboard: {save(workspace)}")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
