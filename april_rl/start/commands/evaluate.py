"""`python -m april_rl evaluate model.path=PATH +recipe=NAME`: evaluate a model on held-out sets
with the engine and the reward of training, without a learner.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from april_rl.config import TrainConfig, to_config
from april_rl.config.store import ConfigError, as_plain, compose_overrides
from april_rl.run.supervision.interrupts import Interrupts
from april_rl.run.tracking.figures import compact, percent
from april_rl.start.commands.arguments import OUTPUT, Arguments, output_folder, writes_output
from april_rl.start.planning.checks import check_settings
from april_rl.task.evaluation.report import (
    FILE_NAME,
    Report,
    difference,
    read_report,
    write_differences,
    write_report,
)

_DESCRIPTION = """\
Samples every prompt of evaluation.sets k times with the engine of training, scores the responses
with its reward, and prints avg@k, pass@k and maj@k with 95 % intervals over prompts. Settings are
the same as for training (april_rl/config/); data.path is not needed. See docs/evaluation.md.

  python -m april_rl evaluate +recipe=tiny_cpu
  python -m april_rl evaluate +recipe=qwen3_4b_dapo model.path=outputs/.../step_500
  python -m april_rl evaluate model.path=MODEL '+evaluation.sets.gsm8k={path: gsm8k_test.jsonl,
      prompt_column: question, answer_pattern: "####\\s*(.+)"}' evaluation.num_samples=4
"""
# Sections of the configuration that an evaluation reads; evaluation.json records them.
_SECTIONS = (
    *("seed", "deterministic", "model", "data", "rollout", "engine", "reward", "environment"),
    "evaluation",
)
_READ = (*_SECTIONS, "runtime", "recipe")
_ROLLOUT_READ = ("temperature", "max_response_tokens", "tick_steps")
_NOT_READ = ("data.path", "data.sources", "evaluation.every")


def main(arguments: Sequence[str]) -> int:
    """Evaluate as the command line asks, print a table and return the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    with output_folder(options.settings, default="outputs/evaluate") as (folder, overrides):
        other = None if options.compare is None else read_report(options.compare)
        report = run_evaluation(overrides, folder, other=other)
        if other is not None:
            _compare(other, report, folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="python -m april_rl evaluate",
        usage="python -m april_rl evaluate [+recipe=NAME] [model.path=PATH] [key=value ...] "
        "[output=FOLDER] [--compare FILE]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", help="+recipe=NAME and key=value, as in training")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help=f"{FILE_NAME} of another evaluation, or its folder: paired differences to it",
    )
    return parser


# Settings.


def _configure(overrides: Sequence[str]) -> tuple[DictConfig, TrainConfig]:
    """Return the settings as composed and as checked; raise ConfigError."""
    for override in overrides:
        _refuse_without_effect(override)
    composed = compose_overrides(overrides)
    if all(chosen is None for chosen in composed.evaluation.sets.values()):
        raise ConfigError(
            "evaluation.sets is empty: choose a recipe that has some with +recipe=NAME, or give "
            "'+evaluation.sets.NAME={path: FILE}'"
        )
    changed = copy.deepcopy(composed)
    OmegaConf.set_struct(changed, False)
    # If data.path was given, keep it: a set with the same path also uses `data.args`.
    if changed.data.sources:
        changed.data.path = ""
    elif OmegaConf.is_missing(changed.data, "path"):
        changed.data.path = "none"
    changed.learner.max_tokens = sys.maxsize
    return composed, to_config(changed)


def _refuse_without_effect(override: str) -> None:
    key = override.lstrip("+~").partition("=")[0].partition("@")[0]
    section, _, rest = key.partition(".")
    is_read = section in _READ and not key.startswith(_NOT_READ)
    if section == "rollout":
        is_read = rest in _ROLLOUT_READ
    if section == "hydra":
        raise ConfigError(f"{key} has no effect here; give {OUTPUT}FOLDER")
    # Unknown keys are reported by the check of all settings.
    if not is_read and section in TrainConfig.__dataclass_fields__:
        remedy = "write '+evaluation.sets.NAME={path: FILE}'" if key == "data.path" else "remove it"
        raise ConfigError(f"{key} has no effect on an evaluation; {remedy}")


# Evaluation.


def run_evaluation(
    overrides: Sequence[str],
    folder: Path,
    *,
    other: Report | None = None,
    interrupts: Interrupts | None = None,
) -> Report:
    """Evaluate every set, write the report to `folder`, print a table and return the report.
    Without `interrupts`, this process ends with the evaluation. Raise RunError for a wrong setting,
    or when `other` has no set in common.
    """
    composed, config = _configure(overrides)
    if (folder / FILE_NAME).exists():
        raise ConfigError(f"{OUTPUT}{folder} already holds an evaluation; give another folder")
    if other is not None and not other.sets.keys() & config.evaluation.sets.keys():
        raise ConfigError(
            f"--compare: no set in common; FILE has {', '.join(other.sets)}, this evaluation has "
            f"{', '.join(config.evaluation.sets)}"
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    interrupts = interrupts or Interrupts()
    config = check_settings(config, trains=False)
    from april_rl.start.commands.evaluation_run import EvaluationRun

    plain: dict[str, Any] = as_plain(composed)
    del plain["data"]["path"], plain["data"]["sources"]  # they are read for training only
    with ExitStack() as stack:
        run = EvaluationRun(config, folder=folder, stack=stack, interrupts=interrupts)
        report = Report(settings={key: plain[key] for key in _SECTIONS}, sets=run.run())
    _show(report, config.model.path)
    with writes_output(folder):
        print(f"written: {write_report(report, folder)}, samples in {folder / 'samples'}")
    return report


def _show(report: Report, model: str) -> None:
    table = Table("set", title=model)
    heads = ("prompts", "k", "T", "top-p", "avg@k", "pass@k", "maj@k", "tokens", "cut off")
    for head in (*heads, "errors"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, of_set in report.sets.items():
        sampling, estimates = of_set.sampling, of_set.estimates
        table.add_row(
            Text(name, no_wrap=True),
            str(of_set.num_prompts),
            str(sampling.num_samples),
            f"{sampling.temperature:g}",
            f"{sampling.top_p:g}",
            *(str(estimates.get(f"{kind}_at_k", "-")) for kind in ("avg", "pass", "maj")),
            compact(of_set.response_tokens_mean),
            percent(of_set.truncated_frac),
            str(of_set.errors),
        )
    Console(width=140).print(table)


def _compare(other: Report, report: Report, folder: Path) -> None:
    differences = {
        name: difference(other.sets[name], report.sets[name])
        for name in report.sets
        if name in other.sets
    }
    for name, found in differences.items():
        changes = ", ".join(
            f"{key.partition('_')[0]}@k {change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
            for key, change in found.changes.items()
        )
        print(f"{name}, {found.num_prompts} common prompts: {changes}")
        if found.notes:
            print(f"  sampled differently: {', '.join(found.notes)}")
    with writes_output(folder):
        print(f"written: {write_differences(differences, folder)}")
