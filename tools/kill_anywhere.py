"""Disturbs a real run in every way known to lose something, and checks that nothing is lost.

    python tools/kill_anywhere.py --kills 50 --seed 7 [--output FOLDER] [key=value ...]

The run is the tiny recipe: real Ray, vLLM and FSDP2, a checkpoint after every step. A life may end
with SIGKILL while it starts, in a step, in a save, between the renames of a save or after a polite
signal; it may begin with an earlier checkpoint, in another directory, or twice at once; it may fail
to write a checkpoint, or be refused for one of nine reasons (tools/kills/kinds.py, refusals.py).
The last one runs to the end. Prints a line for each; the exit status is 1, and the reasons are
named, when a check fails. The same seed gives the same choices; moments depend on the machine.

With environments, every call of a slow tool is made once, or marked as a further attempt:

    python tools/kill_anywhere.py data.environment=true reward.function=environment \\
      environment.function=april_rl.task.environments.tiny_sums:Sums environment.max_turns=2 \\
      environment.max_observation_tokens=192 environment.args.log=FILE

or, with an agent instead (PYTHONPATH=tools), environment.function=kills.counted_agent:run,
environment.max_turns=3 and environment.max_observation_tokens=300.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from kills import checks
from kills.kinds import KINDS
from kills.run import Run

# Steps that a life may make, and additional steps of the last one.
_FOR_EVER, _LAST_STEPS = 10**6, 2


def live(run: Run, random: Random, *, kills: int) -> None:
    """Run as many lives as the arguments say, then one to the end, and check everything."""
    with ThreadPoolExecutor(max_workers=kills + 1) as threads:
        lives = _lives(run, random, kills=kills)
        ended = [threads.submit(checks.check_processes, run, life) for life in lives]
    for check in ended:
        check.result()
    checks.check_shared_memory(run)
    checks.check_rows(run)
    checks.check_samples(run)
    checks.check_calls(run)


def _lives(run: Run, random: Random, *, kills: int) -> Iterator[int]:
    """Yield the number of each life that has ended. The next one begins at once, while processes
    of the last one may still be ending.
    """
    for number in range(1, kills + 1):
        started = time.monotonic()
        run.begin_life()
        [kind] = random.choices(list(KINDS), weights=list(KINDS.values()))
        what = kind(run, random)
        yield run.num_lives
        checks.check_checkpoints(run)
        took_s = time.monotonic() - started
        print(f"{number}/{kills}: {what}; {took_s:.0f} s, step {run.last_step()}", flush=True)
    run.begin_life()
    run.num_steps = run.last_step() + _LAST_STEPS
    if run.end(run.start()) != 0:
        run.fail(f"the last life did not end well; see {run.log}")
    yield run.num_lives
    checks.check_checkpoints(run)


def main() -> int:
    """Run the test that the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="keep the run here")
    parser.add_argument("settings", nargs="*", help="key=value, added to the tiny recipe")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = (args.output or Path(folder)).resolve()
        output.mkdir(parents=True, exist_ok=True)
        run = Run(output, args.settings, num_steps=_FOR_EVER)
        live(run, Random(args.seed), kills=args.kills)
    print(f"{args.kills} kills, seed {args.seed}: {len(run.failures)} checks failed")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
