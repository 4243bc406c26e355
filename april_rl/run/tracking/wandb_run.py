"""Weights & Biases: online, offline or not at all; online without key or network is offline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

import wandb

from april_rl.config.choices import WandbMode
from april_rl.config.secrets import mask
from april_rl.run.tracking.backends import BackendSettings, LibraryRun
from april_rl.run.tracking.keys import RUN_TIME, TRAINED_TOKENS
from april_rl.run.tracking.labels import versions

_INIT_TIMEOUT_S = 20.0  # how long a server may take to respond at the start
_FINISH_TIMEOUT_S = 20.0  # how long uploads may take at the end; what is left can be synced later
_FLUSH_S = 1.0  # what an offline run may lose by kill -9; W&B's default is 15
_FINISHED, _FAILED, _KILLED = 0, 1, 255  # the exit codes that W&B shows as these states


class WandbRun(LibraryRun):
    """A run of W&B, whose axes are the step, the trained tokens and the time since it began."""

    def __init__(self, run: wandb.Run) -> None:
        super().__init__(wandb, lambda step, row: run.log({"step": step, **row}))
        self._run = run
        self.id: str = run.id
        run.define_metric("step", hidden=True)
        for axis in (TRAINED_TOKENS, RUN_TIME):
            run.define_metric(axis, step_metric="step")
        run.define_metric("*", step_metric="step")

    def finish(self, error: BaseException | None = None) -> None:
        """End the run; uploads get twenty seconds, files stay in the run directory."""
        self._run.finish(exit_code=_exit_code(error))


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return _FINISHED
    return _KILLED if isinstance(error, KeyboardInterrupt) else _FAILED


def start_wandb(settings: BackendSettings, *, tell: Callable[[str], None]) -> WandbRun:
    """Return a run with its files in RUN/wandb; it continues `wandb_id` if that is given. If an
    online run is recorded offline, the reason is reported once.
    """
    given = sys.argv
    sys.argv = mask(given)  # W&B records the command line, which may have secrets
    try:
        return _start(settings, tell=tell)
    finally:
        sys.argv = given


def _start(settings: BackendSettings, *, tell: Callable[[str], None]) -> WandbRun:
    wandb.setup(wandb.Settings(silent=True))
    if settings.tracking.wandb is WandbMode.online:
        try:
            # No prompt is allowed: behind a live view a question would never be seen.
            if not wandb.login(prompt=False):
                raise wandb.errors.UsageError("no API key, run `wandb login`")
            return _begin(settings, "online")
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            tell(
                f"W&B is not reachable ({reason}); the run is recorded offline, upload it later "
                f"with: wandb sync {settings.run_dir}/wandb/offline-run-*"
            )
    return _begin(settings, "offline")


def _begin(settings: BackendSettings, mode: Literal["online", "offline"]) -> WandbRun:
    labels, run_id = settings.labels, settings.wandb_id
    run = wandb.init(
        mode=mode,
        project=settings.tracking.project,
        name=labels.name,
        group=labels.group or None,
        tags=labels.tags,
        dir=str(settings.run_dir),
        config={**settings.config, "versions": dict(versions())},
        reinit="create_new",
        id=run_id or None,
        resume="allow" if run_id else None,
        settings=wandb.Settings(
            console="off",
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
            x_transaction_log_flush_interval=_FLUSH_S,
        ),
    )
    return WandbRun(run)
