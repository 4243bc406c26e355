"""Response lengths by group, from the files of a run, of `profile` or of another trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from april_rl.errors import RunError

# Names of a response's prompt, length, tokens and text, in the order in which they are looked for.
_PROMPTS = ("prompt_id", "uid", "group_id", "problem_id", "group_index", "prompt", "input")
_LENGTHS = ("num_tokens", "response_length", "completion_length", "completion_len", "output_tokens")
_TOKENS = ("response_ids", "completion_ids", "response_tokens", "completion_tokens", "output_ids")
_TEXTS = ("response", "completion", "output")
Count = Callable[[str], int]


class RecordingError(RunError):
    """A run or a file lacks what a simulation needs; the message says what and why."""


def read_lengths(path: Path, count: Count) -> tuple[tuple[int, ...], ...]:
    """Return the response tokens of the samples of each group.

    `path` is a run directory (its `samples/`), a profile.json, a file of JSON lines, or a folder of
    such files, as trainers dump their generations. A line has a prompt (its id or text) and, under
    one of the names that trainers use, a number of tokens, the tokens, or the text, whose tokens
    `count` counts. Raise RecordingError naming file and line.
    """
    if path.name == "profile.json":
        return _of_profile(path)
    folder = path / "samples" if (path / "samples").is_dir() else path
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
    groups = read_groups(files, count)
    if not groups:
        raise RecordingError(f"lengths={path} has no line of a response (*.jsonl)")
    return groups


def read_groups(files: Sequence[Path], count: Count) -> tuple[tuple[int, ...], ...]:
    """Return the response tokens of the samples of each group in files of JSON lines, as
    `read_lengths` does; none without a line.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for file in files:
        for prompt, num_tokens in _of_lines(file, count):
            groups.setdefault((file.name, prompt), []).append(num_tokens)
    return tuple(map(tuple, groups.values()))


def _of_profile(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["lengths"]
        return tuple(tuple(map(int, group)) for group in found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"lengths={path} is not the file of a profile ({error})") from error


def _of_lines(path: Path, count: Count) -> Iterator[tuple[str, int]]:
    """Yield (prompt, response tokens) of every line."""
    try:
        # splitlines would also split a response at U+2028.
        lines = path.read_text(encoding="utf-8").strip().split("\n")
    except (OSError, ValueError) as error:
        raise RecordingError(f"lengths={path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            yield str(_first(record, _PROMPTS)), _num_tokens(record, count)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordingError(f"{path}:{number} is not a recorded sample ({error})") from error


def _num_tokens(record: Mapping[str, Any], count: Count) -> int:
    found = _first(record, (*_LENGTHS, *_TOKENS, *_TEXTS))
    if isinstance(found, str):
        return count(found)
    return len(found) if isinstance(found, list) else int(found)


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:  # noqa: ANN401 (JSON)
    for name in names:
        if name in record:
            return record[name]
    raise KeyError(f"none of {', '.join(names)}")
