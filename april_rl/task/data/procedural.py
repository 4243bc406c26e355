"""Rows of `reasoning_gym:NAME`, drawn from a seed, and a check of the task's verifier."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

import xxhash

from april_rl.config.task import TASK_PREFIX, PromptSetConfig
from april_rl.errors import DataError

_NUM_ROWS = {"train": 2000, "test": 200}  # used unless `args` has a size
_MIXTURE = "composite"  # the library's task that mixes others
_TEST_SHARE = 5  # one question in five goes to the split `test`
_TEST_SEED = 0  # seed of the split `test` in every run, so that evaluations are comparable
_NUM_TRIED = 16  # rows whose gold answer and wrong answers are scored
_LIMIT_S = 300.0  # time limit for drawing the rows
_WRONG = ("this is not an answer", "", "0")

Scorer = Callable[[str, Mapping[str, Any]], float]  # (answer, entry) to score


def open_task(chosen: PromptSetConfig, *, key: str, seed: int = 0) -> Any:  # noqa: ANN401
    """Return the library's task, a question by index; raises DataError if it rejects a setting."""
    where, task = f"{key}={chosen.path}", chosen.path.removeprefix(TASK_PREFIX)
    split, args = chosen.split, chosen.args
    if split not in _NUM_ROWS:
        raise DataError(
            f"{where}: procedural tasks have the splits train and test, got split={split}"
        )
    if "seed" in args:
        raise DataError(
            f"{where}: args.seed={args['seed']} has no effect: training rows are drawn from the "
            "run's seed, and the split test has the same rows in every run; remove it"
        )
    size = args.get("size", _NUM_ROWS[split])
    if not isinstance(size, int) or size < 1:
        raise DataError(f"{where}: args.size={size} must be a whole number of at least 1")
    tasks = _library(where).factory.DATASETS
    if task not in tasks:
        raise DataError(f"{where}: there is no such task; the tasks are {', '.join(sorted(tasks))}")
    known = [entry.name for entry in fields(tasks[task][1]) if entry.name != "seed"]
    for name in sorted(args.keys() - {*known}):
        raise DataError(f"{where}: the task has no setting args.{name}; it has {', '.join(known)}")
    is_test = split == "test"
    share = _TEST_SHARE if is_test else _TEST_SHARE / (_TEST_SHARE - 1)
    own: dict[str, Any] = {"size": round(size * share * 1.25) + 20}
    own["seed"] = _TEST_SEED if is_test else seed
    try:
        if task == _MIXTURE:
            spec, plain = _library(where).composite.DatasetSpec, {"weight": 1.0, "config": {}}
            own["datasets"] = [spec(**{**plain, **each}) for each in args.get("datasets", ())]
        return _library(where).create_dataset(task, **{**args, **own})
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"{where}: the task rejects args={args}: {error}; change them") from error


def draw_rows(chosen: PromptSetConfig, *, key: str, seed: int) -> dict[str, list[str]]:
    """Return the columns `prompt`, `answer` and `entry` of `reasoning_gym:NAME`.

    `entry` is JSON with task, question, answer and metadata; the reward `reasoning_gym` needs it to
    score a response. `chosen.args` are the task's own settings (`size` is the number of rows);
    `seed` draws the training rows. The hash of a question decides its split, so no question is in
    both.
    Raises DataError as `open_task` does, and if the task takes too long or its verifier is wrong.
    """
    where, task = f"{key}={chosen.path}", chosen.path.removeprefix(TASK_PREFIX)
    opened = open_task(chosen, key=key, seed=seed)
    size = chosen.args.get("size", _NUM_ROWS[chosen.split])
    entries = _draw(opened, where=where, split=chosen.split, size=size)
    names = [e["metadata"]["source_dataset"] if task == _MIXTURE else task for e in entries]
    for name in dict.fromkeys(names):
        own = [entry for entry, of in zip(entries, names, strict=True) if of == name]
        check_verifier(name, own, where=where if name == task else f"{where} of {name}")
    return {
        "prompt": [str(entry["question"]) for entry in entries],
        "answer": [str(entry["answer"]) for entry in entries],
        "entry": [json.dumps({"task": n, **e}) for n, e in zip(names, entries, strict=True)],
    }


def check_verifier(task: str, entries: list[dict[str, Any]], *, where: str) -> None:
    """Raise DataError unless the task scores its own answers 1 and wrong ones below 1.

    The reward `reasoning_gym` counts a score below 1, or an exception on a wrong answer, as 0.
    """
    score: Scorer = _library(where).get_score_answer_fn(task)
    step = -(-len(entries) // _NUM_TRIED)
    for entry in entries[::step]:
        gold, value = entry["answer"], _score(score, entry["answer"], entry)
        if value != 1.0:
            raise DataError(
                f"{where}: the verifier of this task gives {value} to its own answer "
                f"{str(gold)[:60]!r}, so no response could be right; choose another task"
            )
        for wrong in _wrong_answers(gold):
            if _score(score, wrong, entry) == 1.0:
                raise DataError(
                    f"{where}: the verifier of this task gives 1 to the wrong answer {wrong!r} "
                    f"(right: {str(gold)[:60]!r}), so a model could learn that answer; choose "
                    "another task"
                )


def _library(where: str) -> Any:  # noqa: ANN401  # the module
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise DataError(
            f"{where} needs the package reasoning-gym ({error}): pip install 'reasoning_gym<0.2'"
        ) from error


def _draw(opened: Any, *, where: str, split: str, size: int) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return the questions of a split, as the reward will see them: after a trip through JSON."""
    entries: list[dict[str, Any]] = []
    started, num = time.monotonic(), len(opened)
    for index in range(num):
        drawn = opened[index]
        kept = {name: drawn[name] for name in ("question", "answer", "metadata")}
        entry = json.loads(json.dumps(kept, default=str))
        is_test = xxhash.xxh3_64_intdigest(entry["question"].encode()) % _TEST_SHARE == 0
        if is_test == (split == "test"):
            entries.append(entry)
        if len(entries) == size:
            break
        if time.monotonic() - started > _LIMIT_S:
            raise DataError(
                f"{where}: drawing {index + 1} of {num} questions took {_LIMIT_S:.0f} s; give "
                "fewer with args.size"
            )
    if not entries:
        raise DataError(
            f"{where}: {num} draws gave no question for the split {split}: the task has "
            "too few different questions with these settings"
        )
    return entries


def _wrong_answers(gold: object) -> list[str]:
    """Return wrong answers to try; a number equal to the right one is left out (0.0 is 0)."""
    try:
        is_zero = float(str(gold)) == 0.0
    except ValueError:
        is_zero = False
    return [wrong for wrong in _WRONG if wrong != gold and not (wrong == "0" and is_zero)]


def _score(score: Scorer, answer: str, entry: Mapping[str, Any]) -> float:
    try:
        with warnings.catch_warnings(action="ignore"):  # SyntaxWarning, where nothing parses
            return float(score(answer, entry))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
        return 0.0
