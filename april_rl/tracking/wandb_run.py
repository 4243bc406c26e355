"""Weights & Biases: online, offline or not at all; online without key or network is offline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import wandb

Mode = Literal["online", "offline", "disabled"]

_INIT_TIMEOUT_S = 20.0  # how long a server may take to answer at the start
_FINISH_TIMEOUT_S = 20.0  # how long uploads may take at the end; what is left can be synced later
_FINISHED, _FAILED, _KILLED = 0, 1, 255  # the exit codes that W&B shows as these states


class Run(Protocol):
    """Where the metrics of a run go beside metrics.jsonl."""

    id: str  # with which a later process goes on with the run; empty: there is none

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def finish(self, error: BaseException | None = None) -> None:
        """End the run, marked failed when `error` ended it, killed when that was an interrupt.

        Returns within seconds, also without a network.
        """


class NoRun:
    """Records nothing."""

    id = ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing."""

    def finish(self, error: BaseException | None = None) -> None:
        """Does nothing."""


class WandbRun:
    """A run of W&B with `step` as the axis of every metric."""

    def __init__(self, run: wandb.Run) -> None:
        """Takes over a run that has begun."""
        self._run = run
        self.id: str = run.id
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One history row with `step` and the values."""
        self._run.log({"step": step, **values})

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the run; uploads get twenty seconds, files stay in the run directory."""
        self._run.finish(exit_code=_exit_code(error))


def _exit_code(error: BaseException | None) -> int:
    """What W&B derives the run's state from."""
    if error is None:
        return _FINISHED
    return _KILLED if isinstance(error, KeyboardInterrupt) else _FAILED


def start_run(
    mode: Mode,
    *,
    project: str,
    name: str,
    run_dir: Path,
    config: Mapping[str, object],
    message: Callable[[str], None],
    run_id: str = "",
) -> Run:
    """Return a run with its files in `run_dir`/wandb; with `run_id` it is that run, which goes on.

    What keeps it offline is told once, in `message`.
    """
    if mode == "disabled":
        return NoRun()
    wandb.setup(wandb.Settings(silent=True))

    def begin(how: Literal["online", "offline"]) -> WandbRun:
        settings = wandb.Settings(
            console="off",
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
        )
        run = wandb.init(
            mode=how,
            project=project,
            name=name,
            dir=str(run_dir),
            config=dict(config),
            reinit="create_new",
            id=run_id or None,
            resume="allow" if run_id else None,
            settings=settings,
        )
        return WandbRun(run)

    if mode == "online":
        try:
            # Asked without a prompt: a question in front of a live view would never be seen.
            if not wandb.login(prompt=False):
                raise wandb.errors.UsageError("no API key, run `wandb login`")
            return begin("online")
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            message(
                f"W&B is not reachable ({reason}); the run is recorded offline, "
                f"upload it later with: wandb sync {run_dir}/wandb/offline-run-*"
            )
    return begin("offline")
