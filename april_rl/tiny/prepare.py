"""Where `builtin:` paths come from: a cache folder that is filled on first use.

The policy is trained in a process of its own, so that whoever asks for it does not import torch. A
folder of the cache appears by one rename, when it is whole; a lock keeps two builders from doing
the work twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from april_rl.errors import RunError
from april_rl.tiny.lock import locked
from april_rl.tiny.task import Problem, held_out_problems, training_problems

PREFIX = "builtin:"
NUM_TRAINING_ROWS = 20_000
NUM_HELD_OUT_ROWS = 256
RL_SEED, WARM_START_SEED = (
    0,
    1,
)  # of the training problems; the policy is warm-started on others than RL draws

_PACKAGE = Path(__file__).resolve().parent
_TRAIN, _HELD_OUT = "train.jsonl", "held_out.jsonl"


class CacheError(RunError):
    """A builtin could not be built or kept."""


class UnknownBuiltinError(RunError, ValueError):
    """There is no builtin of that name."""


def resolve(path: str, *, key: str = "path") -> str:
    """The file or folder behind a `builtin:` path, built when missing; any other string as it is.

    `builtin:tiny` is the folder of a warm-started Hugging Face model with its tokenizer;
    `builtin:arithmetic` and `builtin:arithmetic_held_out` are jsonl files with the columns `prompt`
    and `answer`. Raises UnknownBuiltinError, which calls the setting `key`, and CacheError when the
    cache folder cannot be written or the warm start fails.
    """
    if not path.startswith(PREFIX):
        return path
    name = path.removeprefix(PREFIX)
    sources: dict[str, Callable[[], Path]] = {
        "tiny": resolve_policy,
        "arithmetic": lambda: resolve_problems() / _TRAIN,
        "arithmetic_held_out": lambda: resolve_problems() / _HELD_OUT,
    }
    if name not in sources:
        known = ", ".join(PREFIX + known for known in sources)
        raise UnknownBuiltinError(f"{key}={path}: no such builtin; there are {known}")
    return str(sources[name]())


def resolve_problems() -> Path:
    """The folder of the two problem files; a second of work when it is missing."""
    folder = cache_root() / f"arithmetic-{_fingerprint(['task.py', 'prepare.py'])}"
    if not folder.is_dir():
        build_once(folder, _write_problems)
    return folder


def resolve_policy() -> Path:
    """The folder of the warm-started policy, trained in a subprocess when it is missing."""
    folder = policy_folder()
    if not folder.is_dir():
        _check_writable(folder.parent)
        _run_builder()
        if not folder.is_dir():
            raise CacheError(f"the warm start ended without leaving {folder}")
    return folder


def policy_folder() -> Path:
    """Where the policy is or will be; its name stands for all that determines the weights."""
    sources = ["task.py", "tokenizer.py", "warm_start.py", "prepare.py"]
    return cache_root() / f"tiny-{_fingerprint(sources, packages=['torch', 'transformers'])}"


def cache_root() -> Path:
    """$APRIL_RL_CACHE, or ~/.cache/april_rl."""
    return Path(os.environ.get("APRIL_RL_CACHE") or Path.home() / ".cache" / "april_rl").absolute()


def warm_start_problems(count: int) -> list[Problem]:
    """What the policy is supervised on; no held-out problem among it."""
    return training_problems(
        count, seed=WARM_START_SEED, held_out=held_out_problems(NUM_HELD_OUT_ROWS)
    )


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Make `folder` by `build`, all or nothing; wait for another process that is already at it.

    `build` gets an empty folder of another name, which is renamed when it returns. What an
    interrupted build left is removed by the next one.
    """
    _check_writable(folder.parent)
    with locked(folder.with_name(f".{folder.name}.lock"), what=str(folder)):
        if folder.is_dir():
            return
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        build(unfinished)
        unfinished.rename(folder)


def _fingerprint(sources: list[str], packages: list[str] | None = None) -> str:
    """Ten hexadecimal digits of the named files of this package and the versions of `packages`."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update((_PACKAGE / source).read_bytes())
    for package in packages or []:
        digest.update(f"{package}=={version(package)}\n".encode())
    return digest.hexdigest()[:10]


def _write_problems(folder: Path) -> None:
    """The training and held-out files."""
    held_out = held_out_problems(NUM_HELD_OUT_ROWS)
    _write_rows(folder / _HELD_OUT, held_out)
    training = training_problems(NUM_TRAINING_ROWS, seed=RL_SEED, held_out=held_out)
    _write_rows(folder / _TRAIN, training)


def _write_rows(path: Path, problems: list[Problem]) -> None:
    """One JSON object a line."""
    lines = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _check_writable(root: Path) -> None:
    """Make the cache folder; raise CacheError when nothing can be written there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(root, os.W_OK | os.X_OK)
        reason = "no permission to write"
    except OSError as error:
        is_writable, reason = False, str(error)
    if not is_writable:
        raise CacheError(
            f"the cache folder {root} cannot be used ({reason}); "
            "set APRIL_RL_CACHE to a folder that can be written"
        )


def _run_builder() -> None:
    """Train the policy in a fresh interpreter that shows progress; CacheError when it fails."""
    paths = [str(_PACKAGE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", __package__]
    exit_code = subprocess.run(command, env=environment, check=False).returncode
    if exit_code:
        raise CacheError(
            f"the warm start of builtin:tiny failed (exit code {exit_code}, its message is above); "
            f"to see it alone run: {' '.join(command)}"
        )
