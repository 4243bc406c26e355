"""Columns that a run does not read although the questions may need them: images and tools."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from april_rl.task.data.sources import RawTable

_MEDIA = re.compile(r"(?:^|_)(?:image|video|audio)s?(?:_|$)")
_PLACEHOLDER = re.compile(r"<\|?(?:image|video|audio|vision)[ _]?\w*\|?>|\[IMG\]")
_MEDIA_CLASSES = ("Image", "Video", "Audio")  # of `datasets`


def placeholder(text: str) -> str | None:
    """Return the mark in a question that stands for an image, video or audio, or None."""
    found = _PLACEHOLDER.search(text)
    return found[0] if found else None


def media_columns(raw: RawTable) -> dict[str, int]:
    """Return the columns with images, videos or audio, and how many rows have some."""
    columns = {
        name: _num_filled(raw.table.data.column(name))
        for name, kind in raw.table.features.items()
        if _MEDIA.search(name) or type(kind).__name__ in _MEDIA_CLASSES
    }
    return {name: number for name, number in columns.items() if number}


def unread_notes(raw: RawTable, needed: Collection[str]) -> Iterator[str]:
    """Yield a note for each column that the questions may need and that is not read."""
    for name, number in media_columns(raw).items():
        if name not in needed:
            yield (
                f"column {name} is not read, and {number:,} of {len(raw.table):,} rows have "
                "something in it: prompts are text only; leave out the questions that need it"
            )
    if "tools" in raw.table.features and "tools" not in needed:
        yield (
            "column tools is not read: the model does not see these tools; name the tools of "
            "an environment (docs/environments.md), or write them into the system message"
        )


def _num_filled(column: pa.ChunkedArray) -> int:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(column)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.binary_length(column)
    else:
        return int(len(column) - column.null_count)
    return int(pc.sum(pc.greater(lengths, 0)).as_py() or 0)
