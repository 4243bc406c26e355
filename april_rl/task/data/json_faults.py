"""Find the first fault of a data file and its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

from april_rl.errors import DataError

_DECODER, _NOT_SPACE = json.JSONDecoder(), re.compile(r"\S")


def check_text(path: str, *, where: str) -> None:
    """Raise DataError naming the first line that is not UTF-8, which `datasets` does not name."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}:{number}: not UTF-8: {error.reason} "
                    f"0x{line[error.start]:02x} at byte {error.start + 1} of the line"
                ) from error


def is_json(path: str) -> bool:
    """Return whether a file is JSON values one after another, over any number of lines."""
    text, at = Path(path).read_text(encoding="utf-8-sig"), 0
    try:
        while start := _NOT_SPACE.search(text, at):
            _, at = _DECODER.raw_decode(text, start.start())
    except json.JSONDecodeError:
        return False
    return True


def json_fault(path: str, *, where: str) -> str | None:
    """Return the first fault of a JSON file with its line, or None if the file is valid."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return _fault_of(text, where=where, first_line=1)
    faults = (
        _fault_of(line, where=where, first_line=number)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    )
    return next((fault for fault in faults if fault), None)


def _fault_of(text: str, *, where: str, first_line: int) -> str | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        return f"{where}:{line}: not valid JSON: {error.msg} (column {error.colno})"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"{where}:{first_line}: has half of a surrogate pair, which is not a character"
    if isinstance(value, (dict, list)):
        return None
    return f"{where}:{first_line}: every line must be a JSON object, got {describe(value)}"


def describe(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]}"
