"""Arguments of a command: what is wrong with them is said in one line."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn


class Arguments(argparse.ArgumentParser):
    """A parser whose errors say what to do."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and end the program with status 2."""
        kind, _, what = message.partition(": ")
        if kind == "unrecognized arguments":
            text = f"{what.split()[0]} is not an option; settings are written KEY=VALUE"
        elif kind == "the following arguments are required":
            text = f"{what} is missing"
        else:
            plain = message.removeprefix("argument ")
            text = re.sub(r"invalid \S+ value: '(.*)'$", r"must be a number, got \1", plain)
        self.exit(2, f"error: {text}. {self.prog} --help shows what it takes\n")
