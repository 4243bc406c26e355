"""`python -m april_rl profile +recipe=NAME`: measure the response lengths of a policy before
training, and which over-sampling factor they call for.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from april_rl.config import TrainConfig, to_config
from april_rl.config.prompt_sets import training_sets
from april_rl.config.store import ConfigError, compose_overrides
from april_rl.config.task import EvaluationSetConfig
from april_rl.errors import RunError
from april_rl.lab.commands.output import write_figures
from april_rl.run.supervision.interrupts import Interrupts
from april_rl.start.commands.arguments import OUTPUT, Arguments, at_least, output_folder
from april_rl.start.planning.checks import check_settings

if TYPE_CHECKING:
    from april_rl.lab.simulator.profile import Profile
    from april_rl.run.tracking.samples_file import EvaluationRecord
    from april_rl.task.data.sets import PromptSets
    from april_rl.task.evaluation.evaluate import EvaluatedSet
    from april_rl.task.evaluation.held_out import HeldOut
    from april_rl.training.rollout.ticks import TickWork


_DESCRIPTION = """\
Samples responses to prompts of the training data with the engine of training and no learner, and
prints how long they are and what every over-sampling factor would gain with such lengths on this
machine, by the simulator. Settings are those of training.

  python -m april_rl profile +recipe=tiny_cpu
  python -m april_rl profile +recipe=qwen3_4b_dapo --prompts 128 --alpha 1.5 2 3
"""
FILE_NAME = "profile.json"
_NUM_STEPS, _WARMUP_STEPS = 12, 6  # counted simulated steps, and steps before them
_ALL = "training"  # name of the set when the data is not a mixture


def main(arguments: Sequence[str]) -> int:
    """Profile as the command line asks, print the figures and return the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    with output_folder(options.settings, default="outputs/profile") as (folder, overrides):
        config = _configure(overrides)
        if (folder / FILE_NAME).exists():
            raise ConfigError(f"{OUTPUT}{folder} already holds a profile; give another folder")
        _profile(config, folder, num_prompts=options.prompts, factors=sorted(set(options.alpha)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="python -m april_rl profile",
        usage="python -m april_rl profile +recipe=NAME [key=value ...] [output=FOLDER] "
        "[--prompts N] [--alpha α ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", help="+recipe=NAME and key=value, as in training")
    parser.add_argument(
        "--prompts",
        type=partial(at_least, 1, int),
        default=64,
        metavar="N",
        help="prompts, each with rollout.group_size samples (default 64)",
    )
    parser.add_argument(
        "--alpha",
        type=partial(at_least, 1, float),
        nargs="+",
        default=[1.5, 2.0, 3.0, 4.0],
        metavar="α",
        help="over-sampling factors to simulate (default 1.5 2 3 4)",
    )
    return parser


def _configure(overrides: Sequence[str]) -> TrainConfig:
    """Return the checked settings of training, with the training data in place of held-out sets."""
    config = check_settings(to_config(compose_overrides(overrides)), evaluates=False)
    sets = {
        name or _ALL: EvaluationSetConfig(path=chosen.path)
        for name, chosen in training_sets(config.data).items()
    }
    evaluation = replace(config.evaluation, max_response_tokens=None, sets=sets)
    return replace(config, evaluation=evaluation)


def _profile(
    config: TrainConfig, folder: Path, *, num_prompts: int, factors: Sequence[float]
) -> None:
    """Sample, simulate, print and write `profile.json` into `folder`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    interrupts = Interrupts()
    from april_rl.start.commands.evaluation_run import EvaluationRun

    with ExitStack() as stack:
        run = EvaluationRun(
            config,
            folder=folder,
            stack=stack,
            interrupts=interrupts,
            choose=partial(_training_prompts, num_prompts=num_prompts),
        )
        config = run.training_config()
        evaluated = [found for _, found in run.evaluate_sets()]
        work, num_engines = list(run.work), run.num_engines
    _show(config, evaluated, work, num_engines=num_engines, factors=factors, folder=folder)


def _training_prompts(
    config: TrainConfig, sets: PromptSets, *, num_prompts: int
) -> dict[str, HeldOut]:
    """Return the prompts to sample, spread evenly over each source, by its weight."""
    from april_rl.task.evaluation.held_out import HeldOut
    from april_rl.task.evaluation.settings import SetSampling
    from april_rl.task.rewards.functions import reward_functions

    sources = config.data.sources
    total = sum(source.weight for source in sources.values())
    found = {}
    for name, table in sets.training().items():
        share = sources[name].weight / total if sources else 1.0
        wanted = min(len(table), max(1, round(share * num_prompts)))
        prompts = table[:: len(table) // wanted][:wanted]
        functions = reward_functions(config.reward)
        found[name or _ALL] = HeldOut(
            name=name or _ALL,
            path=table.path,
            prompts=prompts,
            sampling=SetSampling(
                num_samples=config.rollout.group_size,
                temperature=config.rollout.temperature,
                top_p=1.0,
                max_response_tokens=config.rollout.max_response_tokens,
                max_prompts=wanted,
            ),
            function=next(each.name for each in functions if each.scores(name)),
            answer_of=None,
        )
    return found


def _show(
    config: TrainConfig,
    evaluated: Sequence[EvaluatedSet],
    work: Sequence[TickWork],
    *,
    num_engines: int,
    factors: Sequence[float],
    folder: Path,
) -> None:
    """Print the lengths, the simulated factors and the advice, and write all of it."""
    from april_rl.lab.simulator.engine_cost import fit_cost
    from april_rl.lab.simulator.length_distributions import Recorded
    from april_rl.lab.simulator.prediction import comparison_table, modes_of, predict
    from april_rl.lab.simulator.profile import advice
    from april_rl.lab.simulator.scaled_down import scale_down
    from april_rl.lab.simulator.scenarios import scenario_of

    profile = _profile_of(evaluated)
    prompts = list(chain.from_iterable(found.held_out.prompts for found in evaluated))
    try:
        cost = fit_cost(work)
    except ValueError as error:
        raise RunError(f"too little was generated ({error}): raise --prompts") from error
    scenario = scenario_of(
        config,
        num_engines=num_engines,
        cost=cost,
        length_of=Recorded(groups=profile.lengths, seed=config.seed),
        keeps_parked=config.rollout.resume.keeps_caches,
        prompt_tokens=fmean(len(prompt.token_ids) for prompt in prompts),
        no_signal_frac=profile.no_signal_frac,
    )
    # A sample stays about α - 1 steps: the configuration refuses a larger α for the same reason.
    allowed = [factor for factor in factors if factor - 1 <= config.rollout.max_staleness]
    modes = modes_of(allowed, refill=config.rollout.refill)
    predictions = list(
        predict(scale_down(scenario), modes, num_steps=_NUM_STEPS, warmup_steps=_WARMUP_STEPS)
    )
    lines = advice(profile, predictions, max_staleness=config.rollout.max_staleness)
    samples = sum(map(len, profile.lengths))
    print(f"response tokens of {samples} samples of {len(prompts)} training prompts")
    print("\n".join(profile.histogram()))
    print("  ".join(f"{name} {value}" for name, value in profile.percentiles.items()), flush=True)
    table = comparison_table(predictions, title="simulated training")
    Console(width=120).print(table)
    print("\n".join(lines))
    rows = [each.figures() for each in predictions]
    found = {**profile.figures(), "factors": rows, "advice": lines}
    write_figures(folder / FILE_NAME, found, option=OUTPUT)
    print(f"written: {folder / FILE_NAME}, samples in {folder / 'samples'}")


def _profile_of(evaluated: Sequence[EvaluatedSet]) -> Profile:
    from april_rl.lab.simulator.profile import Profile

    groups: dict[tuple[str, int], list[EvaluationRecord]] = {}
    for found in evaluated:
        for record in found.records:
            groups.setdefault((found.held_out.name, record.prompt_id), []).append(record)
    records = [record for group in groups.values() for record in group]
    return Profile(
        lengths=tuple(tuple(record.num_tokens for record in group) for group in groups.values()),
        truncated_frac=fmean(record.finish_reason == "length" for record in records),
        no_signal_frac=fmean(len({r.reward for r in group}) == 1 for group in groups.values()),
    )
