"""The command line of training: Hydra composes the settings, the trainer runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from april_rl.config import TrainConfig, config_dir, register, to_config
from april_rl.config.store import (
    ConfigError,
    as_hydra_takes,
    as_plain,
    in_our_words,
    without_folder,
)
from april_rl.config.wrong_settings import wrong_option
from april_rl.errors import RunError
from april_rl.run.checkpointing.run_lock import RunOwnedError, own
from april_rl.run.supervision.interrupts import EXIT_STATUS, Interrupts
from april_rl.run.tracking.labels import RunLabels, run_labels, versions
from april_rl.training.rollout.garbage_collection import imports_frozen
from april_rl.types import OnStep

register()

# These options name our own configuration file.
_OF_HYDRA = ("--config-path", "-cp", "--config-name", "-cn")


def run_directory(resume: str | None, name: str, fresh: str) -> str:
    """Return `fresh`, or with resume=auto the directory of the newest unfinished run of `name`."""
    from april_rl.run.checkpointing.resume import AUTO, unfinished_run

    unfinished = unfinished_run(Path("outputs", name)) if resume == AUTO else None
    return str(unfinished or fresh)


OmegaConf.register_new_resolver("run_directory", run_directory, replace=True)


def main() -> None:
    """Train as the command line says. If something in it is wrong, end with status 1 and one
    message. A failed run of a sweep does not end the sweep.
    """
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # Hydra then raises its errors instead of printing them, so we can explain them
    )
    given = sys.argv[1:]
    if "--version" in given:
        print("\n".join(f"{name} {text}" for name, text in versions().items()))
        return
    try:
        sys.argv[1:] = _as_hydra_takes(given)
        _hydra_main()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        wrong = error if isinstance(error, ConfigError) else in_our_words(error, given)
        print(f"error: {wrong}", file=sys.stderr, flush=True)
        sys.exit(1)


def _as_hydra_takes(arguments: Sequence[str]) -> list[str]:
    """Return what Hydra gets of the arguments; raise ConfigError for an unknown option."""
    parser = get_args_parser()
    parser.exit_on_error = parser.allow_abbrev = False
    try:
        _, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    unknown = [word for word in arguments if word.partition("=")[0] in _OF_HYDRA]
    unknown += [word for word in others if word.startswith("-")]
    if unknown:
        raise ConfigError(wrong_option(unknown[0], arguments, TrainConfig))
    plain = without_folder(arguments)
    if late := parser.parse_known_args(plain)[1]:  # they stand on both sides of an option
        before = plain[: len(plain) - 1 - plain[::-1].index(late[0])]
        option = " ".join(before[max(n for n, word in enumerate(before) if word.startswith("-")) :])
        raise ConfigError(f"{late[0]} stands behind {option}: put settings before {option}")
    return as_hydra_takes(plain)


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="train")
def _hydra_main(composed: DictConfig) -> int:
    """Run a composed configuration; a failed run ends the program, but not a sweep."""
    status = _status_of(composed)
    if status and not _is_sweep():
        sys.exit(status)
    return status


def _is_sweep() -> bool:
    return HydraConfig.get().mode is RunMode.MULTIRUN


def _status_of(composed: DictConfig) -> int:
    """Train and return the exit status; a mistake in the configuration gives one message."""
    run_dir, started_s = Path(HydraConfig.get().runtime.output_dir), time.time()
    try:
        config = to_config(composed)
        with own(run_dir):
            run(config, run_dir, as_plain(composed), labels=_labels(config))
    except RunOwnedError as error:  # the directory belongs to another run: nothing is written there
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except RunError as error:
        _report(run_dir, since_s=started_s)
        print(f"error: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):
            run_dir.rmdir()  # fails if the folder is not empty, which is fine
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(EXIT_STATUS)  # this also ends a sweep
    except Exception:  # after any error, other runs of a sweep may succeed
        if not _is_sweep():
            raise
        traceback.print_exc()
        return 1
    return 0


def _labels(config: TrainConfig) -> RunLabels:
    """Return the labels of the run from the command line that Hydra has read."""
    job = HydraConfig.get()
    sweep = Path(job.sweep.dir).name if _is_sweep() else ""
    return run_labels(config.name, overrides=job.overrides.task, seed=config.seed, sweep=sweep)


def run(
    config: TrainConfig,
    run_dir: Path,
    plain: Mapping[str, object],
    *,
    labels: RunLabels | None = None,
    on_step: OnStep | None = None,
    interrupts: Interrupts | None = None,
) -> None:
    """Train in `run_dir`, which the caller owns; config.yaml will show `plain`. Without
    `interrupts`, this process ends with the run. Imports are late, so that --help answers at once.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it on import
    interrupts = interrupts or Interrupts()
    from april_rl.start.commands.early_resume import is_over
    from april_rl.start.planning.checks import check_settings

    if is_over(config, run_dir):
        return
    config = check_settings(config)
    with imports_frozen():
        from april_rl.run.checkpointing.resume import load
        from april_rl.run.supervision.restarts import Restarts
        from april_rl.start.assembly.run import assemble
        from april_rl.training.trainer import Trainer

    if config.trainer.max_hours is not None:
        interrupts.end_after(hours=config.trainer.max_hours)
    restarts = Restarts(config.runtime.max_restarts, resume=config.resume)
    for resume in restarts.lives():
        with (
            restarts.suppress_failure(),
            Trainer(
                replace(config, resume=resume),
                run_dir=run_dir,
                plain_config=plain,
                interrupts=interrupts,
                resumed=None if resume is None else load(resume, run_dir),
                build=partial(assemble, labels=labels),
                on_step=on_step,
            ) as trainer,
        ):
            restarts.begin(trainer)
            trainer.count(restarts.metrics())
            trainer.run()
    if not interrupts.is_requested:  # after a signal the process has only seconds left
        _report(run_dir, since_s=0.0)


def _report(run_dir: Path, *, since_s: float) -> None:
    """Write report.html; a failure here never fails the run."""
    from april_rl.start.commands.at_end import report_line

    if (line := report_line(run_dir, since_s=since_s)) is not None:
        print(line, flush=True)
