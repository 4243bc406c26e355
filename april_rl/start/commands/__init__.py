"""Commands other than training, one module each: `python -m april_rl NAME ...` runs them.

A command is a module with `main(arguments)`, which returns the exit status or raises RunError,
and a line in `COMMANDS`. The module is imported only when it runs, so the list costs nothing and
needs no lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from april_rl.errors import RunError

_CORE, _LAB = __name__, "april_rl.lab.commands"


class Command(NamedTuple):
    """One-line summary of a command, and the folder of its module."""

    summary: str
    folder: str = _LAB


# The order is the order of the printed list.
COMMANDS = {
    "evaluate": Command(
        "avg@k, pass@k and maj@k of any checkpoint or hub model on held-out sets", _CORE
    ),
    "rehearse": Command("try a recipe before GPUs are rented: data, reward, memory, two steps"),
    "plan": Command("what a run fits on, takes and costs on GPUs that are not rented yet"),
    "profile": Command(
        "lengths of a policy's responses, and which over-sampling factor they call for"
    ),
    "data": Command(
        "inspect a data set: rows, duplicates, lengths, prompts, overlap with evaluation sets"
    ),
    "attack": Command("what does a reward pay for nothing? try responses that deserve none"),
    "certify": Command("do transformers, learner and engine compute the same model here?"),
    "simulate": Command(
        "simulate over-sampling factors, without a GPU, from a recorded run or a preset"
    ),
    "checkpoint": Command("show a run's checkpoints, check their files, remove old ones", _CORE),
    "push": Command("upload an exported policy to the Hugging Face hub, with a model card"),
    "report": Command(
        "write report.html of a run: figures, advice, charts, the rollout as a picture, samples"
    ),
    "replay": Command("train a recorded step again, with the same settings or with others"),
    "why": Command("which metric left its band first, and which explanation a replay confirms"),
    "compare": Command(
        "compare runs: time to an accuracy, samples/s, ages, waste, with paired intervals"
    ),
    "dashboard": Command("save a W&B dashboard: the first look at runs, or a sweep over α"),
}


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run the command `name` of `COMMANDS`; return its exit status. Raise RunError for a
    mistake, or when the installation lacks the lab that it belongs to.
    """
    try:
        module = import_module(f"{COMMANDS[name].folder}.{name}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("april_rl.lab"):
            raise
        raise RunError(f"{name} needs april_rl/lab, which this installation lacks") from error
    status: int = module.main(arguments)
    return status
