"""Write docs/settings.md, which lists every setting, from the dataclasses in april_rl/config/."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tokenize
from collections.abc import Iterator
from enum import Enum
from functools import cache
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from april_rl.config import TrainConfig
from april_rl.config.task import PromptSetOverrides

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
_HEAD = """# Settings

`python tools/settings_page.py` writes this page from `april_rl/config/`: change meanings there.

Give a setting on the command line as `SECTION.KEY=VALUE`, or in a recipe
([usage.md](usage.md#configuration)). NAME stands for a name that you choose. `null` means not set,
`auto` that the plan decides. A value of another type or out of its range is refused, and so is a
setting without effect.
`python -m april_rl.train +recipe=NAME --cfg job` prints the settings of a recipe; the defaults here
are those without a recipe. A row that ends with … continues below its table.
"""
_WIDTH_OF_INDENT = 4
_LONGEST_ROW = 195
_TABLE = "| key | default | what it is |\n|---|---|---|"
_FIRST = (  # settings that a person sets first
    *("model.path", "data.path", "reward.function", "trainer.num_groups", "rollout.group_size"),
    *("rollout.max_response_tokens", "rollout.over_sampling_factor", "optimizer.lr"),
    *("learner.max_tokens", "runtime.num_workers"),
)


def page() -> str:
    """Return the text of the page: a table of the settings that matter most, then one for each
    section.
    """
    rows = {key: row for section, of in sections() for key, row, _ in _rows(section, of)}
    parts = [_HEAD, "## The ten that matter\n", _TABLE, *(rows[key] for key in _FIRST), ""]
    for section, of in sections():
        parts += [f"## {section}\n", _plain(inspect.getdoc(of) or "") + "\n"]
        own = list(_rows(section, of))
        parts += _inherited_lines(section, of)
        parts += [_TABLE, *(row for _, row, _ in own), ""] if own else []
        more = [f"- **`{key}`**: {rest}" for key, _, rest in own if rest]
        parts += [*more, ""] if more else []
    return "\n".join(parts).rstrip() + "\n"


def sections() -> Iterator[tuple[str, type]]:
    """Yield the name of every section with its dataclass; sections named by users come after
    their own.
    """
    yield "The run itself", TrainConfig
    for name, hint in get_type_hints(TrainConfig).items():
        if not dataclasses.is_dataclass(hint):
            continue
        yield name, hint
        for key, inner in get_type_hints(hint).items():
            if (entry := _entry(inner)) is not None:
                yield f"{name}.{key}.NAME", entry


def _entry(hint: Any) -> type | None:  # noqa: ANN401 (a type as written)
    """Return the dataclass of the entries of a mapping whose names users give, else None."""
    last = get_args(hint)[-1] if get_origin(hint) is dict else None
    return last if dataclasses.is_dataclass(last) else None


def own_settings(of: type) -> list[dataclasses.Field[Any]]:
    """Return the settings of a section that have a meaning of their own there."""
    hints, said = get_type_hints(of), comments(of)
    return [
        field
        for field in dataclasses.fields(of)
        if not dataclasses.is_dataclass(hints[field.name])
        if said[field.name] or not issubclass(of, PromptSetOverrides)
    ]


def _inherited_lines(section: str, of: type) -> Iterator[str]:
    """Yield a line for the settings of a user's prompt set that have the same meaning as above."""
    own = {field.name for field in own_settings(of)}
    left = [field.name for field in dataclasses.fields(of) if field.name not in own]
    if not issubclass(of, PromptSetOverrides):
        return
    for owner in dict.fromkeys((section.partition(".")[0], "data")):
        above = {field.name for field in dataclasses.fields(get_type_hints(TrainConfig)[owner])}
        names = ", ".join(f"`{name}`" for name in left if name in above)
        yield f"As in `{owner}`, unless given: {names}.\n"
        left = [name for name in left if name not in above]


def _rows(section: str, of: type) -> Iterator[tuple[str, str, str]]:
    """Yield the key of each setting of a section; its row of the table: key, default, meaning
    with choices, and type; and the part of its meaning that is too long for a row.
    """
    for field in own_settings(of):
        hint, text = get_type_hints(of)[field.name], comments(of)[field.name]
        kind = next(filter(_is_choice, (hint, *get_args(hint))), None)
        if kind is not None:
            text = text or (inspect.getdoc(kind) or "").removesuffix(".")
            text = f"{text}. {'; '.join(_values(kind))}"
        key = field.name if of is TrainConfig else f"{section}.{field.name}"
        kinds = _type(hint).removesuffix(" or null") if field.default is None else _type(hint)
        start, end = f"| `{key}` | {_default(field)} |", f"({kinds}{_bounds(field)}) |"
        room = _LONGEST_ROW - len(start) - len(end)
        first, rest = _split(_plain(text).replace("|", r"\|"), room)
        yield key, f"{start} {first} {end}", rest


def _split(text: str, room: int) -> tuple[str, str]:
    """Return the first sentence of a text that is longer than `room`, or as many of its parts as
    fit, and the rest.
    """
    if len(text) <= room:
        return text, ""
    for mark in (". ", "; ", ", "):
        ends = [each.start() for each in re.finditer(re.escape(mark), text[:room])]
        ends = [end for end in ends if text.count("(", 0, end) == text.count(")", 0, end)]
        if ends:
            end = ends[0] if mark == ". " else ends[-1]
            return f"{text[:end]} …", text[end + len(mark) :]
    raise ValueError(f"no part of this meaning fits into a row: {text}")


@cache
def comments(of: type) -> dict[str, str]:
    """Return the comments of a class by the name that they belong to; those of a base class come
    first.
    """
    found: dict[str, str] = {}
    for base in reversed(of.__mro__):
        if base.__module__.startswith("april_rl."):
            for name, text in _comments_in(inspect.getsource(base)):
                found[name] = "; ".join(filter(None, (found.get(name), text)))
    return found


def _comments_in(source: str) -> Iterator[tuple[str, str]]:
    """Yield every name that is assigned in a class with its comment, empty without one."""
    lines = tokenize.generate_tokens(StringIO(source).readline)
    by_line = {token.start[0]: token for token in lines if token.type == tokenize.COMMENT}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if not isinstance(node, ast.AnnAssign | ast.Assign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        above = node.lineno - 1
        while above in by_line and by_line[above].start[1] == _WIDTH_OF_INDENT:
            above -= 1
        assert node.end_lineno is not None
        of_node = [
            by_line[line] for line in range(above + 1, node.end_lineno + 1) if line in by_line
        ]
        yield ast.unparse(target), " ".join(each.string.lstrip("# ") for each in of_node)


def _is_choice(kind: Any) -> bool:  # noqa: ANN401 (a type as written)
    return isinstance(kind, type) and issubclass(kind, Enum)


def _values(kind: type[Enum]) -> Iterator[str]:
    """Yield a phrase for each value of a choice."""
    said = comments(kind)
    for member in kind:
        text = said.get(member.name)
        yield f"`{member.name}`: {_plain(text)}" if text else f"`{member.name}`"


def _type(hint: Any) -> str:  # noqa: ANN401 (a type as written)
    if _is_choice(hint):
        return "choice"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:
        return " or ".join(map(_type, arguments))
    return {NoneType: "null", str: "text", bool: "true or false"}.get(hint, hint.__name__)


def _bounds(field: dataclasses.Field[Any]) -> str:
    bounds = field.metadata.get("bounds")
    return f", {bounds}" if bounds else ""


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return "required" if value == MISSING else f"`{_spell(value)}`"


def _spell(value: object) -> str:
    """Return a value as the command line takes it."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case Enum():
            return value.name
        case list():
            return f"[{','.join(map(_spell, value))}]"
        case "":
            return "''"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
