"""Shared by all parts: the machine, the output folder, commands in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[1]
PROJECT = TOOLS.parent
_TOO_SMALL = "does not fit into memory"  # words in the memory plan's message
_PATIENCE_S = 20.0  # time for a terminated command to end


class SkippedError(Exception):
    """A part cannot be measured here; the message says why."""


class FailedError(Exception):
    """The command of a part failed; the message says how."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a part's table."""

    quantity: str
    measured: str
    expected: str = ""  # "": nothing
    is_as_expected: bool | None = None  # None: there was no expectation
    meaning: str = ""
    setting: str = ""  # the setting to use, as on the command line
    holds_anywhere: bool = False  # True: the expectation does not depend on the speed of a GPU

    def without_gpu(self) -> Row:
        """Return the line without expectations that only a GPU can meet, and without settings for
        one.
        """
        if self.holds_anywhere:
            return self
        return replace(self, expected="", is_as_expected=None, setting="")


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a part: the lines of its table, and the numbers behind them."""

    rows: Sequence[Row]
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Findings of `device.probe`."""

    device: str  # cpu or gpu
    name: str
    count: int  # devices
    total_gib: float  # memory of one device
    without_engine: str  # why no engine runs here; "": one does
    without_pytest: str

    @property
    def is_gpu(self) -> bool:
        """Return whether expected values apply."""
        return self.device == "gpu"


NO_MACHINE = Machine(
    device="cpu", name="", count=0, total_gib=0.0, without_engine="", without_pytest=""
)


@dataclass(slots=True)
class Session:
    """One start of the program: machine, folder and how to run commands."""

    folder: Path
    machine: Machine
    timeout_s: float = 1200.0  # time limit of each command

    @property
    def is_gpu(self) -> bool:
        """Return whether to use the sizes of a GPU."""
        return self.machine.is_gpu

    def measure(self, function: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Return what a function of this folder, such as `device.probe`, returns in a process."""
        name = function.partition(".")[2]
        values = json.dumps(arguments, default=str)
        return self.run_json(name, "-m", "acceptance.call", function, values)

    def run_json(self, name: str, *command: object) -> Any:  # noqa: ANN401 - JSON
        """Return what a Python command writes to its --json."""
        path = self.folder / "logs" / f"{name}.json"
        path.unlink(missing_ok=True)
        self.run(name, sys.executable, *command, "--json", path)
        return json.loads(path.read_text(encoding="utf-8"))

    def run(self, name: str, *command: object) -> Path:
        """Return the log of a command that succeeded. Raise FailedError with its last lines, or
        SkippedError if these say that the device is too small.
        """
        log, status = self.run_any(name, *command)
        if status:
            words = last_words(log)
            kind = SkippedError if _TOO_SMALL in words else FailedError
            raise kind(f"{words} (exit status {status}, {log})")
        return log

    def run_any(self, name: str, *command: object) -> tuple[Path, int]:
        """Return the log and the exit status of a command; raises FailedError when it hangs."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
                env={**os.environ, "PYTHONPATH": _search_path()},
                start_new_session=True,
            )
            try:
                return log, process.wait(self.timeout_s)
            except subprocess.TimeoutExpired as error:
                message = f"no end after {self.timeout_s / 60:.0f} minutes ({log})"
                raise FailedError(message) from error
            finally:
                _end(process)

    def model(self, name: str = "model", **widths: object) -> Path:
        """Return the folder of a random model, which is written when it is first asked for; on a
        GPU with `widths` of `device.write_model`.
        """
        path = self.folder / name
        if not path.is_dir():
            self.measure("device.write_model", folder=path, is_tiny=not self.is_gpu, **widths)
        return path


@dataclass(frozen=True, slots=True)
class Part:
    """A part and the function that measures it."""

    name: str
    title: str
    minutes: float  # duration on a GPU
    measure: Callable[[Session], Measured]
    needs_engine: bool = True


def _search_path() -> str:
    """Return PYTHONPATH for commands that import this folder."""
    return os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])


def last_words(log: Path) -> str:
    """Return the last line of a log that looks like an error, with its list of reasons, or the last
    of all.
    """
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if _is_error(line)]
    if not errors:
        return (lines or ["it printed nothing"])[-1]
    start = errors[-1]
    reasons = takewhile(lambda line: line.startswith("- "), lines[start + 1 :])
    return " ".join([lines[start], *reasons])


def _is_error(line: str) -> bool:
    return line.partition(" ")[0].endswith(("Error:", "error:"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command, and everything left in its process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
