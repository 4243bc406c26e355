"""Build the `builtin:` models and files in a cache folder on first use.

The policy is trained in a process of its own, so that the caller does not import torch. A cache
folder appears by one rename when it is complete; a lock keeps two processes from building it twice.
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
# Seeds of the training problems: the warm start sees other problems than RL.
RL_SEED, WARM_START_SEED = 0, 1

_PACKAGE = Path(__file__).resolve().parent
_TRAIN, _HELD_OUT = "train.jsonl", "held_out.jsonl"


class CacheError(RunError):
    """A builtin cannot be built, or the cache folder cannot be used."""


class UnknownBuiltinError(RunError, ValueError):
    """There is no builtin of that name."""


def resolve(path: str, *, key: str = "path") -> str:
    """Return the file or folder of a `builtin:` path, building it if missing; return other strings
    unchanged.

    `builtin:tiny` is the folder of a warm-started Hugging Face model with its tokenizer;
    `builtin:arithmetic` and `builtin:arithmetic_held_out` are jsonl files with the columns `prompt`
    and `answer`. Raises UnknownBuiltinError naming the setting `key`, and CacheError when the cache
    folder cannot be written or the warm start fails.
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
        raise UnknownBuiltinError(f"{key}={path}: no such builtin; choose one of {known}")
    return str(sources[name]())


def resolve_problems() -> Path:
    """Return the folder of the two problem files; building it takes about a second."""
    folder = cache_root() / f"arithmetic-{_fingerprint(['task.py', 'prepare.py'])}"
    if not folder.is_dir():
        build_once(folder, _write_problems)
    return folder


def resolve_policy() -> Path:
    """Return the folder of the warm-started policy, training it in a subprocess if it is
    missing.
    """
    folder = policy_folder()
    if not folder.is_dir():
        _check_writable(folder.parent)
        _run_builder()
        if not folder.is_dir():
            raise CacheError(f"the warm start of builtin:tiny ended without creating {folder}")
    return folder


def policy_folder() -> Path:
    """Return the folder of the policy, built or not; its name hashes everything that determines the
    weights.
    """
    sources = ["task.py", "tokenizer.py", "warm_start.py", "prepare.py"]
    return cache_root() / f"tiny-{_fingerprint(sources, packages=['torch', 'transformers'])}"


def cache_root() -> Path:
    """Return $APRIL_RL_CACHE, or ~/.cache/april_rl if that is not set."""
    return Path(os.environ.get("APRIL_RL_CACHE") or Path.home() / ".cache" / "april_rl").absolute()


def warm_start_problems(count: int) -> list[Problem]:
    """Return `count` problems for supervised training, none of them held out."""
    return training_problems(
        count, seed=WARM_START_SEED, held_out=held_out_problems(NUM_HELD_OUT_ROWS)
    )


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Create `folder` by calling `build`, completely or not at all; wait if another process is
    building it.

    `build` gets an empty temporary folder, which is renamed when it returns. What an interrupted
    build left behind is removed by the next one.
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
    """Return ten hexadecimal digits of a hash over files of this package and versions of
    `packages`.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update((_PACKAGE / source).read_bytes())
    for package in packages or []:
        digest.update(f"{package}=={version(package)}\n".encode())
    return digest.hexdigest()[:10]


def _write_problems(folder: Path) -> None:
    held_out = held_out_problems(NUM_HELD_OUT_ROWS)
    _write_rows(folder / _HELD_OUT, held_out)
    training = training_problems(NUM_TRAINING_ROWS, seed=RL_SEED, held_out=held_out)
    _write_rows(folder / _TRAIN, training)


def _write_rows(path: Path, problems: list[Problem]) -> None:
    lines = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _check_writable(root: Path) -> None:
    """Create the cache folder; raise CacheError if it is not writable."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(root, os.W_OK | os.X_OK)
        reason = "no permission to write"
    except OSError as error:
        is_writable, reason = False, str(error)
    if not is_writable:
        raise CacheError(
            f"the cache folder {root} cannot be used ({reason}); "
            "set APRIL_RL_CACHE to a writable folder"
        )


def _run_builder() -> None:
    """Train the policy in a new interpreter that shows its progress; raise CacheError if it
    fails.
    """
    paths = [str(_PACKAGE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", __package__]
    exit_code = subprocess.run(command, env=environment, check=False).returncode
    if exit_code:
        raise CacheError(
            f"the warm start of builtin:tiny failed (exit code {exit_code}, see above); "
            f"to run it alone: {' '.join(command)}"
        )
