"""The program in a response: its last fenced block of Python."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from april_rl.answers.extraction import after_thinking

_OPENING = re.compile(
    r"(?P<indent>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)*)(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<info>.*)"
)
_PYTHON = {"python", "python3", "py", "py3"}
# Comments and texts, so that a quote in them is not taken for the start of a multi-line text.
_TEXTS = re.compile(r"""#.*|\"{3}|'{3}|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?""")


@dataclass(slots=True, kw_only=True)
class _Block:
    """A block that is open: how it began, and its lines so far."""

    indent: str
    fence: str
    language: str
    lines: list[str] = field(default_factory=list)
    quotes: str = ""  # quotes of the multi-line text that contains the last line
    num_before_fence: int | None = None  # number of lines before the first fence in such a text

    @property
    def is_python(self) -> bool:
        return self.language in ("", *_PYTHON)

    def closes(self, line: str) -> bool:
        """Return whether a line ends the block, on its own or after code; else take it as code.

        No fence ends a block of Python within a text over several lines, or in a comment.
        """
        stripped = line.strip(" \t")
        bare = stripped.rstrip(self.fence[0])
        is_fence = len(stripped) - len(bare) >= len(self.fence)
        if not self.is_python:
            return is_fence and not bare
        quotes = _quotes_after(bare if is_fence else stripped, self.quotes)
        if is_fence and not quotes and not bare.startswith("#"):
            if bare:
                self.lines.append(line[: line.rindex(bare) + len(bare)])
            return True
        if is_fence and not bare and self.num_before_fence is None:
            self.num_before_fence = len(self.lines)
        self.quotes = quotes
        self.lines.append(line)
        return False

    def code(self) -> str:
        """Return the code, without the indentation of the fence."""
        width = len(self.indent)
        if not width:
            return "".join(f"{line}\n" for line in self.lines)
        cut = [line[:width].lstrip(" \t") + line[width:] for line in self.lines]
        return textwrap.dedent("".join(f"{line}\n" for line in cut))


def last_block(response: str) -> str | None:
    """Return the last complete block of Python after the thinking, or the last block without a
    language if none is named Python; None when there is none, or the thinking does not end.
    """
    found: dict[bool, str] = {}  # the last block, by whether its language is named
    for block in _blocks((after_thinking(response) or "").split("\n")):
        if block.is_python:
            found[bool(block.language)] = block.code()
    return found.get(True, found.get(False))


def _blocks(lines: Sequence[str]) -> Iterator[_Block]:
    """Yield the complete blocks, in order. If a block has no end because a multi-line text in it is
    never closed, the block ends at the first fence in that text.
    """
    index = 0
    while index < len(lines):
        block = _read_opening(lines[index])
        index += 1
        if block is None:
            continue
        for end in range(index, len(lines)):
            if block.closes(lines[end].rstrip("\r")):
                index = end + 1
                yield block
                break
        else:
            if block.num_before_fence is None:
                return
            index += block.num_before_fence + 1
            del block.lines[block.num_before_fence :]
            yield block


def _read_opening(line: str) -> _Block | None:
    opening = _OPENING.fullmatch(line.rstrip())
    if opening is None:
        return None
    word = re.match(r"[ \t]*\{?\.?([\w+#-]*)", opening["info"])
    language = word[1].lower() if word else ""
    return _Block(indent=opening["indent"], fence=opening["fence"], language=language)


def _quotes_after(code: str, quotes: str) -> str:
    """Return the triple quotes that are open after a line, given the ones open before it."""
    place = 0
    while True:
        if quotes:
            end = code.find(quotes, place)
            if end < 0:
                return quotes
            place = end + len(quotes)
        text = _TEXTS.search(code, place)
        if text is None:
            return ""
        place = text.end()
        quotes = text[0] if text[0] in ('"""', "'''") else ""
