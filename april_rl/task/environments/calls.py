"""Calls with a side effect, made once in the life of a sample: each started call and its result
is written to a file, so that an episode that is built again does not call a second time.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from shutil import rmtree
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

from april_rl.types import SampleId

EVALUATIONS = "evaluation"  # folder with a folder for each held-out set


class Call(NamedTuple):
    """Facts about a call, passed to the called function if it has a parameter `call`."""

    # Equal for every attempt at this call and different for any other call: an idempotency key.
    key: str
    attempt: int  # counts from 1; if it is higher, an earlier attempt began and may have ended


class CallError(RuntimeError):
    """A call cannot be recorded."""


class Calls:
    """The calls of one sample."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = uuid4().hex  # the name of these calls, in the first line of the file
        self._begun: dict[str, int] = {}  # number of attempts by key
        self._results: dict[str, Any] = {}  # by key
        lines = list(_lines(self._path))
        for line in lines:
            if "name" in line:
                self._name = line["name"]
            elif "started_over" in line:
                self._results.clear()
            elif "result" in line:
                self._results[line["key"]] = line["result"]
            else:
                self._begun[line["key"]] = line["attempt"]
        self._is_named = bool(lines)
        # Numbers of the calls that are running or have returned, by function and arguments.
        self._taken: defaultdict[str, set[int]] = defaultdict(set)
        self._lock = Lock()  # the environment may use threads
        self._is_closed = False
        self.num_made, self.num_repeated = 0, 0  # since `take_counts`

    def start_over(self) -> None:
        """Set the notes aside if there are any: every call is made again, as a further attempt."""
        with self._lock:
            self._results.clear()
            if self._is_named:
                self._note({"started_over": True})

    def close(self) -> None:
        """Refuse calls from now on: the episode was given up, but parts of it still run."""
        with self._lock:
            self._is_closed = True

    def once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the result of the sample's n-th call of `function` with these arguments; call it
        if it has not returned yet. A call that raised does not count: the next one with its
        arguments is a further attempt at it. Return an awaitable for a coroutine function.

        Raise CallError for arguments or a result that JSON cannot encode, and when the episode
        was given up meanwhile.
        """
        given = _as_text(function, args, kwargs)
        if inspect.iscoroutinefunction(function):
            return self._once_async(given, function, args, kwargs)
        with self._taking(given) as key:
            if key in self._results:
                return self._results[key]
            return self._note_result(key, function(*args, **self._begin(key, function, kwargs)))

    async def _once_async(
        self,
        given: str,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        with self._taking(given) as key:
            if key in self._results:
                return self._results[key]
            return self._note_result(
                key, await function(*args, **self._begin(key, function, kwargs))
            )

    def take_counts(self) -> tuple[int, int]:
        """Return how many calls and how many further attempts were made since the last time."""
        counts = self.num_made, self.num_repeated
        self.num_made = self.num_repeated = 0
        return counts

    @contextmanager
    def _taking(self, given: str) -> Iterator[str]:
        """Yield the key of a call with these arguments; release its number if the call raises."""
        with self._lock:
            taken = self._taken[given]
            number = next(each for each in count(1) if each not in taken)
            taken.add(number)
        text = f"{self._name} {number} {given}"
        has_returned = False
        try:
            yield hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            has_returned = True
        finally:
            if not has_returned:
                with self._lock:
                    taken.discard(number)

    def _begin(
        self, key: str, function: Callable[..., Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        with self._lock:
            if self._is_closed:
                raise CallError("the episode was abandoned")
            attempt = self._begun[key] = self._begun.get(key, 0) + 1
            self.num_made += 1
            self.num_repeated += attempt > 1
            self._note({"key": key, "attempt": attempt})
        if "call" not in inspect.signature(function).parameters:
            return kwargs
        return {**kwargs, "call": Call(key, attempt)}

    def _note_result(self, key: str, result: Any) -> Any:  # noqa: ANN401
        """Record the result of a call; return it as it will be read back."""
        try:
            self._results[key] = json.loads(json.dumps(result))
        except TypeError as error:
            raise CallError(f"a call returned a value that JSON cannot encode: {error}") from error
        with self._lock:
            self._note({"key": key, "result": self._results[key]})
        return self._results[key]

    def _note(self, line: dict[str, Any]) -> None:
        """Append a line, and sync it to the disk before anything else happens."""
        written = json.dumps(line) + "\n"
        if not self._is_named:
            written = json.dumps({"name": self._name}) + "\n" + written
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        self._is_named = True


def path_of(folder: Path, sample_id: SampleId, dataset: str) -> Path:
    """Return the file with a sample's calls; every held-out set numbers its prompts from 0."""
    if sample_id.prompt_id < 0:
        folder = folder / EVALUATIONS / dataset
    return folder / f"{sample_id.prompt_id}_{sample_id.index}.jsonl"


class Notes:
    """The files with the calls of samples, which are removed when no checkpoint can need them."""

    def __init__(self, folder: Path, *, num_saves: int) -> None:
        self._folder = folder
        # Samples that ended since each of the last saves, the latest first.
        self._ended: deque[set[SampleId]] = deque([set()], maxlen=num_saves + 1)

    def keep(self, sample_id: SampleId) -> None:
        self._ended[0].discard(sample_id)

    def end(self, sample_id: SampleId) -> None:
        self._ended[0].add(sample_id)

    def on_save(self) -> None:
        """Note that the run is saved; remove the notes that no checkpoint needs."""
        if len(self._ended) == self._ended.maxlen:
            for sample_id in self._ended[-1]:
                path_of(self._folder, sample_id, "").unlink(missing_ok=True)
        self._ended.appendleft(set())

    def on_evaluation_end(self) -> None:
        """Remove the notes of evaluations after the last one has ended."""
        rmtree(self._folder / EVALUATIONS, ignore_errors=True)


def _as_text(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if not inspect.isroutine(function):
        raise CallError(f"{function!r:.80} has no name: give a function or a method")
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        return json.dumps([name, args, kwargs], sort_keys=True)
    except TypeError as error:
        raise CallError(f"JSON cannot encode the arguments of {name}: {error}") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; remove a last one that was cut off."""
    if not path.exists():
        return
    written = path.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    if len(whole) < len(written):
        os.truncate(path, len(whole))
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise CallError(
                f"{path}:{number}: the note of a call is damaged ({error}), so it is not known "
                "what was called; remove the file to let the sample call everything again"
            ) from error
