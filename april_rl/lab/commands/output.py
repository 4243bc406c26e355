"""The files that commands write where an option says."""

from __future__ import annotations

import json
from pathlib import Path

from april_rl.errors import RunError


def write_page(path: Path, page: str, *, option: str = "--html ") -> None:
    """Write a page, or another text, to the file of an option; raise RunError."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{option}{path} cannot be written: {error.strerror}") from error


def write_figures(path: Path, figures: object, *, option: str = "--json ") -> None:
    """Write plain data as JSON to the file of an option; raise RunError."""
    write_page(path, json.dumps(figures, indent=1) + "\n", option=option)
