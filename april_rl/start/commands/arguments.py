"""Arguments of a command, with mistakes reported in one line, and its folder of output."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from april_rl.errors import RunError

OUTPUT = "output="


@contextmanager
def output_folder(settings: Sequence[str], *, default: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder that the last output=FOLDER names, else one below `default` with the present
    time as its name, and the other settings. After a mistake or Ctrl-C, remove it if it is empty.
    """
    given = [each.removeprefix(OUTPUT) for each in settings if each.startswith(OUTPUT)]
    folder = Path(given[-1] if given else time.strftime(f"{default}/%Y-%m-%d_%H-%M-%S"))
    try:
        yield folder, [each for each in settings if not each.startswith(OUTPUT)]
    except (RunError, KeyboardInterrupt):
        with suppress(OSError):
            folder.rmdir()  # fails if the folder is not empty, which is fine
        raise


@contextmanager
def writes_output(folder: Path) -> Iterator[None]:
    """Raise RunError, which names the setting, for an error of the disk."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{OUTPUT}{folder} cannot be written: {error.strerror}") from error


class Arguments(argparse.ArgumentParser):
    """A parser whose errors say what to do."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and end the program with status 2."""
        kind, _, what = message.partition(": ")
        if kind == "unrecognized arguments":
            text = self._unknown(what.split())
        elif kind == "the following arguments are required":
            text = f"{what} is missing"
        else:
            plain = message.removeprefix("argument ")
            text = re.sub(r"invalid \S+ value: '(.*)'$", r"must be a number, got \1", plain)
        stop = "" if text.endswith("?") else "."
        self.exit(2, f"error: {text}{stop} {self.prog} --help shows what it takes\n")

    def _unknown(self, words: list[str]) -> str:
        places = [action for action in self._actions if not action.option_strings]
        options = [word for word in words if word.startswith("-")]
        if not options:
            taken = " ".join(str(place.metavar or place.dest) for place in places)
            return f"{' '.join(words)}: too many arguments; the command takes {taken}"
        option = options[0].partition("=")[0]
        if any(place.dest == "settings" for place in places):
            return f"{option} is not an option; settings are written KEY=VALUE"
        known = [name for name in self._option_string_actions if name not in ("-h", "--help")]
        near = get_close_matches(option, known, n=1, cutoff=0.75)
        rest = f"it has {', '.join(known)}" if known else "the command takes none"
        hint = f"did you mean {near[0]}?" if near else rest
        return f"{option} is not an option; {hint}"


def at_least(least: int, kind: type[int] | type[float], text: str) -> int | float:
    """Return the number of an argument."""
    with suppress(ValueError):
        if (number := kind(text)) >= least:
            return number
    raise argparse.ArgumentTypeError(f"must be a number >= {least}, got {text}")
