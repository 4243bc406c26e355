"""`python -m april_rl plan +recipe=NAME gpus=h100:8`: what a run fits on, takes and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from april_rl.lab.commands.output import write_figures, write_page
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.recorded_lengths import read_lengths

if TYPE_CHECKING:
    from april_rl.config import TrainConfig
    from april_rl.lab.price.assumptions import Assumptions
    from april_rl.lab.price.gpus import Gpus
    from april_rl.lab.price.plan import GpuPlan

_USAGE = """\
usage: python -m april_rl plan +recipe=NAME [key=value ...] gpus=h100:1,2,4,8,l40s:4
           [price.h100=2.5] [mean_response_tokens=N] [sigma=0.6] [prompt_tokens=256]
           [lengths=PATH] [turns=N] [observation_tokens=N] [tool_s=S] [tool_sigma=D] [score_s=S]
           [evaluation_prompts=N] [calibration=FILE] [json=FILE] [html=FILE]

  python -m april_rl plan +recipe=qwen3_4b_dapo gpus=h100:8,h200:4,8 price.h100=2.5 price.h200=3
  python -m april_rl plan +recipe=qwen3_0_6b_gsm8k gpus=4090:1,2 mean_response_tokens=300

The same settings as python -m april_rl.train. For each choice of GPUs: whether the run fits into
their memory and what it decides, then seconds of a step by part, hours and money for
trainer.num_steps, for the synchronous loop, refill and several over-sampling factors. Nothing of it
was measured: speeds are the GPU's data sheet and shares of it that programs reach, unless
calibration names the calibration.json that tools/gpu_acceptance.py wrote there. The line below a
table gives the time if they reach more or less. Evaluations are counted in the hours if the number
of their prompts is known: by max_prompts, or evaluation_prompts for each set without it.

Lengths of responses are lognormal with mean mean_response_tokens (half of
rollout.max_response_tokens by default) and deviation sigma of their logarithm; or they come from
lengths: a run directory, a profile.json, or a file of JSON lines of another trainer. With turns,
each is split evenly, and a tool call of a median of tool_s seconds adds observation_tokens."""

_OWN = ("lengths", "json", "html")  # arguments that only this command reads


def main(arguments: Sequence[str]) -> int:
    """Plan the run that `arguments` compose on each choice of GPUs, and return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    from april_rl.config import TrainConfig
    from april_rl.config.store import ConfigError, compose_overrides, to_config
    from april_rl.config.wrong_settings import wrong_option
    from april_rl.lab.price.assumptions import NAMES, Assumptions
    from april_rl.lab.price.gpus import GPUS, PRICE, gpus_among
    from april_rl.start.planning.checks import check_settings

    if options := [word for word in arguments if word.startswith("-")]:
        own_names = ("gpus", "price", *_OWN, *NAMES)
        raise ConfigError(wrong_option(options[0], arguments, TrainConfig, own=own_names))
    gpus, rest = gpus_among(arguments)
    if not gpus:
        raise ConfigError(f"{GPUS}h100:8 is missing: which GPUs? ({PRICE}h100=2.5 is their price)")
    own = dict(word.split("=", 1) for word in rest if word.partition("=")[0] in _OWN)
    assumed, overrides = Assumptions.of([w for w in rest if w.partition("=")[0] not in own])
    # Each choice of GPUs has its own number.
    overrides = [*overrides, "runtime.device=gpu", "runtime.num_workers=auto"]
    config = check_settings(to_config(compose_overrides(overrides)))
    _plan(config, gpus, assumed, own)
    return 0


def _plan(
    config: TrainConfig, gpus: Sequence[Gpus], assumed: Assumptions, paths: Mapping[str, str]
) -> None:
    """Print the plan for each choice of GPUs, and write what `paths` ask for, by _OWN."""
    from april_rl.lab.price.plan import plan_on, plan_text
    from april_rl.lab.price.prediction import work_of
    from april_rl.lab.rehearsal.real_models import real_models
    from april_rl.lab.report.html import page
    from april_rl.start.planning.model import without_network_go_offline

    without_network_go_offline()
    say = partial(print, flush=True)
    if lengths := paths.get("lengths"):
        from april_rl.lab.rehearsal.stand_ins import find_tokenizer

        tokenizer = find_tokenizer(config.model.path, say)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        groups = read_lengths(Path(lengths), lambda text: len(encode([text])[0]))
        assumed = replace(assumed, lengths=Recorded(groups=groups))
    models, shape = real_models(config, say)
    trainer = config.trainer
    work = work_of(config, assumed, shape=shape, critic=models.beside.critic)
    about = (
        f"{trainer.num_steps:,} steps of {trainer.num_groups} x "
        f"{config.rollout.group_size} samples; {assumed.lengths_in_words(config)}; prompts of "
        f"{work.prompt_tokens:,.0f} tokens"
    )
    if config.evaluation.sets and not assumed.evaluated_responses(config):
        about += "; evaluations are not counted: give evaluation_prompts"
    say(f"{config.name}: {about}\n")
    plans = []
    for choice in track(gpus, "planning", console=Console(stderr=True), transient=True):
        plans.append(plan_on(choice, config, models=models, work=work, assumed=assumed))
        say(f"{plan_text(plans[-1])}\n")
    if len(priced := [plan for plan in plans if plan.prices]) > 1:
        say(_best(priced))
    if file := paths.get("json"):
        write_figures(Path(file), [plan.figures() for plan in plans], option="json=")
    if file := paths.get("html"):
        text = "\n\n".join([about, *map(plan_text, plans)])
        body = f'<h1>Plan of {escape(config.name)}</h1><pre class="scroll">{escape(text)}</pre>'
        text = page(f"{config.name}: plan", [body], has_charts=False)
        write_page(Path(file), text, option="html=")


def _best(plans: Sequence[GpuPlan]) -> str:
    """Return which choices are fastest and cheapest with the settings' schedule."""
    from april_rl.lab.price.plan import in_dollars

    fastest = min(plans, key=lambda plan: plan.own.step_s)
    lines = [f"fastest: {fastest.gpus.name}, {fastest.hours(fastest.own.step_s):.3g} hours"]
    costs = {plan.gpus.name: cost for plan in plans if (cost := plan.money(plan.own.step_s))}
    if costs:
        cheapest = min(costs, key=lambda name: costs[name])
        lines.append(f"cheapest: {cheapest}, {in_dollars(costs[cheapest])}")
    return "\n".join(lines)
