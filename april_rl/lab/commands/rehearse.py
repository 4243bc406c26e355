"""`python -m april_rl rehearse +recipe=NAME`: try out a whole recipe at small size on this
machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

_USAGE = """\
usage: python -m april_rl rehearse +recipe=NAME [key=value ...] [quick=true] [output=FOLDER]
           [gpu_gib=79.2] [mean_response_tokens=N] [sigma=0.6] [prompt_tokens=256]
           [accept=NAME,NAME] [calibration=FILE]

  python -m april_rl rehearse +recipe=qwen3_4b_dapo
  python -m april_rl rehearse +recipe=qwen3_4b_dapo rollout.max_response_tokens=32768

The same settings as python -m april_rl.train. On the CPU, in about two minutes: the recipe's data
and prompts, what its reward says to right and wrong answers, the memory plan of the real model on
the real GPUs, the gain of over-sampling by the simulator, and two steps (rollout, reward, update,
weight sync, checkpoint, evaluation) of a model of the same architecture with tiny random layers.
Without a network, rows and models of the hub are replaced by stand-ins, and the report says so.

quick=true skips the simulator and the two steps, and takes seconds. gpu_gib is the memory of one
of the real GPUs, mean_response_tokens the expected mean length, half of
rollout.max_response_tokens by default. calibration is the calibration.json that
tools/gpu_acceptance.py wrote on such a GPU: its speeds and memory take the place of an H100's data
sheet and of estimates.

Exit status 0: no findings; 1: findings, each with a name. Accept an intended one by its name:
accept=one_update."""


def main(arguments: Sequence[str]) -> int:
    """Rehearse the recipe that `arguments` compose and return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    from april_rl.config import TrainConfig
    from april_rl.config.store import ConfigError, compose_overrides, to_config
    from april_rl.config.wrong_settings import wrong_option
    from april_rl.lab.price.assumptions import NAMES, Assumptions
    from april_rl.start.planning.checks import check_settings

    if options := [word for word in arguments if word.startswith("-")]:
        own_names = ("output", "quick", *NAMES)
        raise ConfigError(wrong_option(options[0], arguments, TrainConfig, own=own_names))
    own = dict(a.split("=", 1) for a in arguments if a.startswith(("output=", "quick=")))
    rest = [a for a in arguments if a.partition("=")[0] not in ("output", "quick")]
    assumed, overrides = Assumptions.of(rest)
    config = check_settings(to_config(compose_overrides(overrides)))
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(own.get("output") or f"outputs/rehearsal/{config.name}-{now}")
    folder.mkdir(parents=True, exist_ok=True)
    from april_rl.lab.rehearsal.rehearsal import Rehearsal

    with (folder / "report.txt").open("w", encoding="utf-8") as report:

        def say(text: str) -> None:
            print(text, flush=True)
            report.write(f"{text}\n")

        rehearsal = Rehearsal(config=config, folder=folder, say=say, assumed=assumed)
        is_good = rehearsal.run(is_quick=own.get("quick") == "true")
    return 0 if is_good else 1
