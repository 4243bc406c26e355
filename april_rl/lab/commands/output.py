"""The files that commands write where an option says."""

from __future__ import annotations

import json
from pathlib import Path

from april_rl.errors import RunError


class OutputError(RunError):
    """A file cannot be written; the message names the option that gave it."""


def write_page(path: Path, page: str, *, option: str = "--html ") -> None:
    """Write a page, or another text, to the file of an option; raise OutputError."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{option}{path} cannot be written: {error.strerror}") from error


def write_figures(path: Path, figures: object, *, option: str = "--json ") -> None:
    """Write plain data as JSON to the file of an option; raise OutputError."""
    write_page(path, json.dumps(figures, indent=1) + "\n", option=option)
