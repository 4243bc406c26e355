"""Train and evaluate from Python; `april_rl.api` is where users import these.

Both take the words of the command line, and also settings as dictionaries, a reward as a function,
and rows as a list, a data set or a table.
"""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import PicklingError
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import cloudpickle

from april_rl.config import TrainConfig
from april_rl.config.python_settings import as_overrides
from april_rl.config.store import (
    ConfigError,
    as_plain,
    compose_overrides,
    register_folder,
    to_config,
)
from april_rl.config.wrong_settings import keys, unknown_setting
from april_rl.errors import RunError
from april_rl.run.checkpointing.exports import newest_export
from april_rl.run.checkpointing.run_lock import own
from april_rl.run.supervision.interrupts import SIGNALS, Interrupts
from april_rl.run.tracking.labels import run_labels
from april_rl.start.command_line import run, run_directory
from april_rl.start.commands.evaluate import run_evaluation
from april_rl.types import OnStep

if TYPE_CHECKING:
    from pandas import DataFrame

    from april_rl.task.evaluation.report import Report

_INPUTS = "inputs"  # folder in the run directory for objects that were passed in
_NOT_SETTINGS = {  # how to pass a value that is not a setting, by argument
    "data": "rows are a list of dicts, data=[{'prompt': ..., 'answer': ...}]",
    "reward": "a reward is a function, reward=FUNCTION",
    "environment": "an environment is a class, environment=CLASS",
}


@runtime_checkable
class WritesParquet(Protocol):
    """Rows with columns: a datasets.Dataset, or a pandas.DataFrame."""

    def to_parquet(self, path: Path) -> object:
        """Write the rows into a file."""


# An argument that is named like a section also takes the settings of that section.
Section = Mapping[str, object]
Rows = (
    WritesParquet | Sequence[Mapping[str, object]] | str | Path
)  # in memory, or the path of a file
Reward = Callable[..., list[float]] | str  # a function, or the text of reward.function
Override = str | Mapping[str, object]  # key=value, or settings nested as in a recipe


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
        return newest_export(self.path)


def _prepare(config_dir: str | Path | None) -> None:
    """Register the recipes of a folder. Raise RunError in a thread, which gets no signals, and in a
    process of a run while that process imports the user's script.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RunError(
            f"train and evaluate were called in the thread {threading.current_thread().name}; they "
            "handle Ctrl-C and SIGTERM, which Python gives to the main thread only: call them "
            "there, or start `python -m april_rl.train` as a process"
        )
    if "_inheriting" in vars(multiprocessing.current_process()):  # as multiprocessing does
        raise RunError(
            "a process of this run has imported the script that started the run, and would start "
            "another run: put the call under if __name__ == '__main__':"
        )
    if config_dir is not None:
        register_folder(Path(config_dir))


def train(
    recipe: str,
    *overrides: Override,
    run_dir: str | Path | None = None,
    config_dir: str | Path | None = None,
    data: Rows | Section | None = None,
    held_out: Mapping[str, Rows] | None = None,
    reward: Reward | Section | None = None,
    tools: Sequence[Callable[..., object]] = (),
    environment: type | Section | None = None,
    functions: Mapping[str, Callable[..., object]] | None = None,
    on_step: OnStep | None = None,
    **settings: object,
) -> TrainedRun:
    """Train as `python -m april_rl.train +recipe=RECIPE OVERRIDES` does, in this process.

    `settings` are settings by name, such as trainer={"num_steps": 3}; they are applied after
    `overrides`. Your own recipes are in `config_dir`/recipe.
    `data` and each set of `held_out`, a dict by name, have the columns that `data.*` names (prompt
    and answer). `reward` is called with prompts, responses and answers in a process of its own, so
    a function from a notebook is copied there with everything it refers to. A dict passed as
    `data`, `reward` or `environment` holds settings of that section. `tools` are functions that the
    policy may call, described by their type hints and docstrings, and `environment` is a class;
    every data set then has them (docs/environments.md). A setting that names a function may be the
    function itself; `functions` maps such settings, for example
    algorithm.loss, to the function (docs/python.md).
    `on_step` is called with each step and its row of metrics.jsonl, from step 0 (the first
    evaluation) on; when it returns True, the run ends with an evaluation, a checkpoint and an
    export.

    Raise RunError for a wrong argument or setting, and KeyboardInterrupt after Ctrl-C, when
    everything is saved.
    """
    _prepare(config_dir)
    _check_on_step(on_step)
    settings |= _sections(data=data, reward=reward, environment=environment)
    settings |= _functions(functions or {})
    copies = _Copies()
    words = _words(recipe, overrides, settings, copies)
    # Names of sets whose files are not written yet.
    sets = held_out if isinstance(held_out, Mapping) else {}
    named = as_overrides({"evaluation.sets": {name: {"path": "given"} for name in sets}})
    config = to_config(compose_overrides([*words, *named]))
    fresh = Path("outputs", config.name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    path = Path(run_dir or run_directory(config.resume, config.name, str(fresh)))
    with _keep_process() as interrupts, own(path):
        labels = run_labels(config.name, overrides=words, seed=config.seed)
        words += _objects(copies, path / _INPUTS, data=data, held_out=held_out or {}, tools=tools)
        composed = compose_overrides(words)
        config = to_config(composed)
        labels = replace(labels, overrides=tuple(words))
        run(
            config,
            path,
            as_plain(composed),
            labels=labels,
            on_step=on_step,
            interrupts=interrupts,
        )
    return TrainedRun(path)


def evaluate(
    recipe: str,
    *overrides: Override,
    output: str | Path | None = None,
    config_dir: str | Path | None = None,
    held_out: Mapping[str, Rows] | None = None,
    reward: Reward | Section | None = None,
    tools: Sequence[Callable[..., object]] = (),
    environment: type | Section | None = None,
    **settings: object,
) -> Report:
    """Evaluate as `python -m april_rl evaluate +recipe=RECIPE OVERRIDES` does; return the report.
    Other arguments are as for `train`. Raise RunError for a wrong argument or setting.
    """
    _prepare(config_dir)
    if not isinstance(settings.get("data", {}), Mapping):
        raise ConfigError("evaluate takes rows as held_out={NAME: rows}; data is for training")
    folder = Path(output or time.strftime("outputs/evaluate/%Y-%m-%d_%H-%M-%S"))
    with _keep_process() as interrupts:
        settings |= _sections(reward=reward, environment=environment)
        copies = _Copies()
        words = _words(recipe, overrides, settings, copies)
        words += _objects(copies, folder / _INPUTS, held_out=held_out or {}, tools=tools)
        return run_evaluation(words, folder, interrupts=interrupts)


def _sections(**given: object) -> dict[str, object]:
    """Return the settings in the arguments that are named like a section: a dict has settings of
    it, and anything but rows is its function. Raise ConfigError for a dict that is meant as rows or
    functions.
    """
    sections: dict[str, object] = {}
    for name, section in given.items():
        if not isinstance(section, Mapping):
            if section is None or name == "data":
                continue
            if not (callable(section) or (isinstance(section, str) and name == "reward")):
                raise ConfigError(
                    f"{name} is a {type(section).__name__}; give a function or a class, or a dict "
                    "of settings; several rewards are reward.functions (docs/rewards.md)"
                )
            sections[name] = {"function": section}
            continue
        sections[name] = section
        known = {key for key in keys(TrainConfig) if key.startswith(f"{name}.")}
        for key in section:
            if f"{name}.{key}" not in known and f"{name}.{key}".rpartition(".")[0] not in known:
                raise ConfigError(
                    f"a dict as {name} holds settings of that section; {_NOT_SETTINGS[name]}. "
                    + unknown_setting(f"{name}.{key}", TrainConfig)
                )
    return sections


def _functions(functions: Mapping[str, Callable[..., object]]) -> Mapping[str, object]:
    """Return functions by setting, which are settings too; raise ConfigError for anything else."""
    if not isinstance(functions, Mapping):
        raise ConfigError("functions is a dict of functions by setting: {'algorithm.loss': loss}")
    for key, function in functions.items():
        if not callable(function):
            raise ConfigError(f"functions[{key!r}] is a {type(function).__name__}; give a function")
    return functions


def _words(
    recipe: str, overrides: Sequence[Override], settings: Mapping[str, object], copies: _Copies
) -> list[str]:
    """Return the arguments as words of a command line."""
    if not isinstance(recipe, str) or {*"+=,"} & {*recipe}:
        raise ConfigError(
            f"the first argument is the name of a recipe, such as 'tiny_cpu', got {recipe!r:.60}"
        )
    words = [f"+recipe={recipe}"]
    for override in (*overrides, settings):
        if isinstance(override, str):
            words.append(override)
        elif isinstance(override, Mapping):
            words += as_overrides(override, copies.name_of)
        else:
            raise ConfigError(
                f"{override!r:.60} is not a setting: give 'KEY=VALUE', a dict of settings, or "
                "keywords such as trainer={'num_steps': 3}"
            )
    if "environment.function" in copies.keys:
        words.append("data.environment=true")
    return words


def _objects(
    copies: _Copies,
    folder: Path,
    *,
    data: Rows | Section | None = None,
    held_out: Mapping[str, Rows],
    tools: Sequence[Callable[..., object]],
) -> Iterator[str]:
    """Write objects and rows into `folder`; yield the settings that name the rows and the tools."""
    if data is not None and not isinstance(data, Mapping):
        yield from as_overrides({"data.path": _file_of(data, "data", folder)})
    if not isinstance(held_out, Mapping):
        raise ConfigError("held_out is a dict of rows by the name of the set: {'test': rows}")
    for name, rows in held_out.items():
        path = _file_of(rows, f"held_out_{name}", folder)
        yield from as_overrides({"evaluation.sets": {name: {"path": path}}})
    if tools:
        if callable(tools) or not all(map(callable, tools)):
            raise ConfigError("tools is a list of functions; a class is environment=CLASS")
        if "environment.function" in copies.keys:
            raise ConfigError(
                "tools and environment: give one of them; a class has tools as methods"
            )
        yield f"environment.function={copies.add(list(tools), 'given_tools', 'tools')}"
        yield "data.environment=true"
    copies.write(folder)


def _file_of(rows: Rows, argument: str, folder: Path) -> str | Path:
    """Return the file that holds the rows; rows in memory are written into `folder` first."""
    if isinstance(rows, str | Path):
        return rows
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(rows, WritesParquet):
        from april_rl.task.data.sources import quiet

        path = folder / f"{argument}.parquet"
        with quiet():
            rows.to_parquet(path)
        return path
    path = folder / f"{argument}.jsonl"
    if isinstance(rows, Sequence) and not rows:
        raise ConfigError(f"{argument} has no rows: the list is empty")
    try:
        lines = [_line_of(row) for row in rows]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{argument} has rows that cannot be written ({error}): give a list of dicts of text "
            "and numbers, a datasets.Dataset, a pandas.DataFrame or the path of a file"
        ) from error
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _line_of(row: object) -> str:
    """Return a row as JSON; raise TypeError or ValueError if it cannot be written."""
    if not isinstance(row, Mapping):
        raise TypeError(f"a row is a dict, got {row!r:.60}")
    return json.dumps(dict(row))


class _Copies:
    """Modules in a folder for objects that were passed in. A process of the run cannot import a
    function of a notebook, or one inside another function.
    """

    def __init__(self) -> None:
        self._given: dict[str, tuple[str, object]] = {}  # name and object, by module
        self.keys: set[str] = set()  # settings whose values are objects

    def name_of(self, key: str, given: Callable[..., object]) -> str:
        """Return `module:name` of the function or class that is the value of a setting."""
        self.keys.add(key)
        has_name = isinstance(given, type | FunctionType | BuiltinFunctionType)
        name = given.__name__ if has_name else "given"
        module = vars(sys.modules.get(given.__module__, sys))
        if given.__module__ != "__main__" and module.get(name) is given:
            return f"{given.__module__}:{name}"
        name = name if name.isidentifier() else "given"
        return self.add(given, f"given_{key.replace('.', '_')}_{name}", name)

    def add(self, given: object, module: str, name: str) -> str:
        """Return `module:name` of the copy that `write` makes, in a module of its own."""
        self._given[module] = name, given
        return f"{module}:{name}"

    def write(self, folder: Path) -> None:
        """Write the modules, and let this process and the run's processes import them."""
        for module, (name, given) in self._given.items():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                pickled = cloudpickle.dumps(given)
            except (PicklingError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{given} refers to an object that cannot be copied into another process: "
                    f"{error}"
                ) from error
            (folder / f"{module}.pickle").write_bytes(pickled)
            (folder / f"{module}.py").write_text(
                '"""An object that was passed to april_rl.api."""\n\n'
                "from pathlib import Path\nfrom pickle import loads\n\n"
                f'{name} = loads(Path(__file__).with_suffix(".pickle").read_bytes())\n',
                encoding="utf-8",
            )
            sys.modules.pop(module, None)  # an earlier run of this process may have imported it
        if self._given:
            importlib.invalidate_caches()
            sys.path.insert(0, str(folder.resolve()))  # processes of the run inherit it


def _check_on_step(on_step: OnStep | None) -> None:
    """Raise ConfigError unless `on_step` can be called with a step and its row."""
    try:
        if on_step is not None:
            inspect.signature(on_step).bind(0, {})
    except TypeError as error:
        raise ConfigError(
            f"on_step is called as on_step(step, row), with the row of metrics.jsonl as a dict; "
            f"{on_step!r} cannot be: {error}"
        ) from error
    except ValueError:  # some built-in functions have no signature
        return


@contextmanager
def _keep_process() -> Iterator[Interrupts]:
    """Yield the signals of a run in a process that lives on; afterwards restore the process's
    signal handlers and its import path, which a run replaces.
    """
    handlers, report = {which: signal.getsignal(which) for which in SIGNALS}, sys.unraisablehook
    folders = list(sys.path)
    interrupts = Interrupts(owns_process=False)
    try:
        yield interrupts
    finally:
        interrupts.disarm()
        sys.unraisablehook, sys.path[:] = report, folders
        for which, handler in handlers.items():
            signal.signal(which, handler)
