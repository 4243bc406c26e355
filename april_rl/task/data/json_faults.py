"""Find the first fault of a data file and its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

_DECODER, _NOT_SPACE = json.JSONDecoder(), re.compile(r"\S")


def is_json(path: str) -> bool:
    """Return whether a file is JSON values one after another, over any number of lines."""
    at = 0
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        while start := _NOT_SPACE.search(text, at):
            _, at = _DECODER.raw_decode(text, start.start())
    except ValueError:
        return False
    return True


def json_fault(path: str, *, where: str) -> str | None:
    """Return the first fault of a JSON file with its line, or None if the file is valid."""
    written = Path(path).read_bytes()
    try:
        text = written.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = written.count(b"\n", 0, error.start) + 1
        place = error.start - written.rfind(b"\n", 0, error.start)
        return (
            f"{where}:{line}: not UTF-8: {error.reason} 0x{written[error.start]:02x} at byte "
            f"{place} of the line"
        )
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
