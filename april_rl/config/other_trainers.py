"""Names of settings in other trainers, read from the tables of docs/coming_from.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from april_rl.config.folders import shipped_folder

_PAGE = "docs/coming_from.md"


class Name(NamedTuple):
    """A setting of another trainer, and what the first column of its row says."""

    trainer: str
    name: str
    here: str  # our setting, or a sentence if we have none

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


@cache
def names() -> tuple[Name, ...]:
    """Return the names that begin a part of a cell, in the order of the page; of two rows with one
    name, only the first.
    """
    found: dict[tuple[str, str], Name] = {}
    trainers: list[str] = []
    for line in (shipped_folder("docs") / "coming_from.md").read_text("utf-8").splitlines():
        if not line.startswith("| "):
            continue
        here, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        if here == "here":
            trainers = cells
            continue
        here = here.replace("`", "")
        for trainer, cell in zip(trainers, cells, strict=False):
            for name, value in _names_in(cell):
                # The row is about one of its values, and another row about another one.
                ours = here.partition("=")[0] if value else here
                found.setdefault((trainer, name), Name(trainer, name, ours))
    return tuple(found.values())


def _names_in(cell: str) -> Iterator[tuple[str, str]]:
    for part in re.split("[,;] ", re.sub(r"\(.*?\)", "", cell)):
        if match := re.match("`([^`= ]+)([^`]*)`", part):
            yield match[1], match[2]


def is_name(key: str) -> bool:
    return any(each.key == key for each in names())


def translate_name(key: str) -> str:
    """Return our name for another trainer's setting, given without or with its sections; or ''."""
    found = [each for each in names() if _is_meant(each.key, key)]
    found.sort(key=lambda each: each.key != key)  # prefer a name that equals the key
    if found:
        trainer, name, here = found[0]
        verb = " is here:" if re.match(r"[\w.]+(?:[,;=]|$)", here) else ":"  # else a sentence
        return f"{trainer}'s {name}{verb} {here} ({_PAGE})"
    owners = [each.trainer for each in names() if each.name.startswith(f"{key}.")]
    return f"it is a section of {owners[0]}; {_PAGE} has its settings" if owners else ""


def _is_meant(name: str, key: str) -> bool:
    return f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")
