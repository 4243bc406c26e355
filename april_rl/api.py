"""Train and evaluate from Python: `from april_rl.api import train, evaluate`.

Both take what the command line takes, and besides a reward as a function and data as data sets.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import PicklingError
from typing import TYPE_CHECKING, Protocol

import cloudpickle

from april_rl.checkpointing.run_lock import own
from april_rl.command_line import run
from april_rl.commands.evaluate import run_evaluation
from april_rl.config.store import (
    ConfigError,
    as_plain,
    compose_overrides,
    register_folder,
    to_config,
)
from april_rl.errors import RunError
from april_rl.supervision.interrupts import SIGNALS
from april_rl.tracking.labels import run_labels

if TYPE_CHECKING:
    from pandas import DataFrame

    from april_rl.evaluation.report import Report

_INPUTS = "inputs"  # folder in the run directory: what was given as objects
_COPIED = "given_reward"  # module of a function that no process could import


class Table(Protocol):
    """Rows with columns: a datasets.Dataset, or a pandas.DataFrame."""

    def to_parquet(self, path: Path) -> object:
        """Write the rows into a file."""


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """The directory of a run that has ended."""

    path: Path

    @property
    def metrics(self) -> DataFrame:
        """Return the metrics, one row a step; docs/metrics.md explains every column."""
        from pandas import read_json

        return read_json(self.path / "metrics.jsonl", lines=True).set_index("step")

    @property
    def export(self) -> Path | None:
        """Return the last exported policy, a Hugging Face folder; None if there is none."""
        found = (self.path / "exports").glob("step_*")
        return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _refuse_wrong_place() -> None:
    """Raise RunError in a process that a run has started, while it imports the user's script, and
    in a thread, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RunError(
            f"train and evaluate were called in the thread {threading.current_thread().name}; they "
            "handle Ctrl-C and SIGTERM, which Python gives to the main thread alone: call them "
            "there, or start `python -m april_rl.train` as a process"
        )
    if "_inheriting" in vars(multiprocessing.current_process()):  # as multiprocessing does
        raise RunError(
            "a process of this run has imported the script that began it, and would begin another: "
            "put the call under if __name__ == '__main__':"
        )


def train(
    recipe: str,
    *overrides: str,
    run_dir: str | Path | None = None,
    config_dir: str | Path | None = None,
    data: Table | None = None,
    held_out: Mapping[str, Table] | None = None,
    reward: Callable[..., list[float]] | None = None,
) -> TrainedRun:
    """Train as `python -m april_rl.train +recipe=RECIPE OVERRIDES` does, in this process.

    Recipes of your own are in `config_dir`/recipe.
    `data` and the sets of `held_out`, by name, have the columns that `data.*` names (prompt and
    answer); `reward` is called with prompts, responses and answers in a process of its own, so a
    function of a notebook is copied there with what it refers to. Raise RunError for what is wrong
    with them, or with a setting; KeyboardInterrupt after Ctrl-C, when everything is saved.
    """
    _refuse_wrong_place()
    if config_dir is not None:
        register_folder(Path(config_dir))
    words = [f"+recipe={recipe}", *overrides]
    config = to_config(compose_overrides(words))
    fresh = Path("outputs", config.name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    path = Path(run_dir) if run_dir else fresh
    with _restore_process(), own(path):
        words += _objects(path / _INPUTS, data, held_out or {}, reward)
        composed = compose_overrides(words)
        config = to_config(composed)
        labels = run_labels(config.name, overrides=overrides, seed=config.seed)
        run(config, path, as_plain(composed), labels=labels)
    return TrainedRun(path)


def evaluate(
    recipe: str,
    *overrides: str,
    output: str | Path | None = None,
    config_dir: str | Path | None = None,
    held_out: Mapping[str, Table] | None = None,
    reward: Callable[..., list[float]] | None = None,
) -> Report:
    """Evaluate as `python -m april_rl evaluate +recipe=RECIPE OVERRIDES` does; return the report.
    The other arguments are the same as for `train`.

    Raise RunError for what is wrong with a setting.
    """
    _refuse_wrong_place()
    if config_dir is not None:
        register_folder(Path(config_dir))
    folder = Path(output or time.strftime("outputs/evaluate/%Y-%m-%d_%H-%M-%S"))
    with _restore_process():
        given = _objects(folder / _INPUTS, None, held_out or {}, reward)
        return run_evaluation([f"+recipe={recipe}", *overrides, *given], folder)


def _objects(
    folder: Path,
    data: Table | None,
    held_out: Mapping[str, Table],
    reward: Callable[..., list[float]] | None,
) -> Iterator[str]:
    """Write what was given as objects, and yield the settings that name the files."""
    if data is not None:
        yield f"data.path={_parquet(data, folder / 'train.parquet')}"
    for name, table in held_out.items():
        path = _parquet(table, folder / f"held_out_{name}.parquet")
        yield f"evaluation.sets.{name}={{path: {path}}}"
    if reward is not None:
        yield f"reward.function={_name_of(reward, folder)}"


def _parquet(table: Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path)
    return path


def _name_of(reward: Callable[..., list[float]], folder: Path) -> str:
    """Return `module:name` of a function that a reward process can import; one that it cannot, of a
    notebook or within another function, is copied into a module in `folder`.
    """
    module = vars(sys.modules.get(reward.__module__, sys))
    if reward.__module__ != "__main__" and module.get(reward.__name__) is reward:
        return f"{reward.__module__}:{reward.__name__}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        pickled = cloudpickle.dumps(reward)
    except (PicklingError, TypeError, ValueError) as error:
        raise ConfigError(f"{reward} refers to what no process can be given: {error}") from error
    (folder / f"{_COPIED}.pickle").write_bytes(pickled)
    (folder / f"{_COPIED}.py").write_text(
        '"""A reward that was given as an object."""\n\n'
        "from pathlib import Path\nfrom pickle import loads\n\n"
        'reward = loads(Path(__file__).with_suffix(".pickle").read_bytes())\n',
        encoding="utf-8",
    )
    sys.path.insert(0, str(folder.resolve()))  # reward processes inherit it
    return f"{_COPIED}:reward"


@contextmanager
def _restore_process() -> Iterator[None]:
    """Give the process its handlers of signals and its path back, which a run replaces."""
    handlers, report = {which: signal.getsignal(which) for which in SIGNALS}, sys.unraisablehook
    folders = list(sys.path)
    try:
        yield
    finally:
        sys.unraisablehook, sys.path[:] = report, folders
        for which, handler in handlers.items():
            signal.signal(which, handler)
