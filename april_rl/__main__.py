"""Entry point: `python -m april_rl` lists the commands, `python -m april_rl COMMAND ...` runs
one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from april_rl.commands import Command, commands

_TRAIN = "train"
_USAGE = "usage: python -m april_rl COMMAND [--help] ..."
_TRAINING = "Training is python -m april_rl.train +recipe=NAME; see --help there."


def main(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` begin with and return its exit status.

    Without a command, or with --help, list the commands; return 2 for an unknown one.
    """
    known = commands()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_listed(known))
        return 0
    name, *rest = arguments
    if name in known:
        return known[name].main(rest)
    print(f"error: {_unknown(name, known)}", file=sys.stderr, flush=True)
    return 2


def _listed(known: Mapping[str, Command]) -> str:
    width = max(map(len, known))
    lines = (f"  {name:<{width}}  {command.summary}" for name, command in known.items())
    return "\n".join((_USAGE, "", *lines, "", _TRAINING))


def _unknown(name: str, known: Mapping[str, Command]) -> str:
    if name == _TRAIN:
        return _TRAINING
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
    return f"{name} is not a command of python -m april_rl; {hint}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
