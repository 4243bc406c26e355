"""Entry point: `python -m april_rl`, or `april-rl`, lists the commands; COMMAND ... runs one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from april_rl.errors import RunError
from april_rl.run.supervision.interrupts import EXIT_STATUS
from april_rl.start.commands import COMMANDS, run_command

_TRAIN, _VERSION = "train", "--version"
_USAGE = "usage: python -m april_rl COMMAND [--help] ..."
_TRAINING = "train with a recipe: python -m april_rl.train +recipe=tiny_cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (None: `sys.argv`) begin with and return its exit status.
    Without a command, or with --help, list the commands; return 2 for an unknown one. A mistake
    ends in one message and status 1.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not {"", here := str(Path.cwd())} & {*sys.path}:
        sys.path.insert(0, here)  # as `python -m` does, so that the user's modules are found
    if arguments[:1] in ([_TRAIN], [_VERSION]):
        from april_rl.start.command_line import main as train

        sys.argv[1:] = arguments[arguments[0] == _TRAIN :]
        train()
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_command_list())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: {_unknown(name)}", file=sys.stderr, flush=True)
        return 2
    try:
        if any(word.startswith("--config-dir") for word in rest):
            from april_rl.config.store import without_folder

            rest = without_folder(rest)
        return run_command(name, rest)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_STATUS


def _command_list() -> str:
    summaries = {_TRAIN: _TRAINING, **{name: COMMANDS[name].summary for name in COMMANDS}}
    width = max(map(len, summaries))
    lines = (f"  {name:<{width}}  {summary}" for name, summary in summaries.items())
    return "\n".join((_USAGE, "", *lines, "", f"{_VERSION} prints the versions that a run uses."))


def _unknown(name: str) -> str:
    if name == "export":
        return "a run exports its policy by itself, to RUN/exports/step_N (docs/checkpoints.md)"
    names = [_TRAIN, *COMMANDS]
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
    return f"{name} is not a command of python -m april_rl; {hint}"


if __name__ == "__main__":
    sys.exit(main())
