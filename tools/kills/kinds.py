"""The ways in which a run's life ends or begins badly. Each function lives one life, checks what
is particular to it, and returns a description in words.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from april_rl.run.checkpointing.folder import recover
from kills.refusals import REFUSALS
from kills.run import Run, rows_of

# Share of kills while a run starts, and how long a start takes.
_STARTING_FRAC, _STARTING_S = 0.2, 12.0
_WORKER_FRAC = 0.3  # share of kills that hit the worker first, and then the controller
_LATEST_S = 2.0  # longest time after a new step
_STOPPING_S = 1.0  # between a polite signal and SIGKILL: parking and saving take about this long
_STEP_S = 0.6
_OWNED = "belongs to a run that is still active"
_UNWRITTEN = "could not be written"
_RARE_STEPS = 4  # steps between checkpoints, so that a kill meets a step and not a save
_HERE = Path(__file__).parent


def kill(run: Run, random: Random) -> str:
    """Send SIGKILL to the controller or to the worker while the run starts, or soon after a
    step, which is saved while the next one is made.
    """
    program = run.start()
    if random.random() < _STARTING_FRAC:
        time.sleep(random.uniform(0, _STARTING_S))
        moment = "while it started"
    else:
        run.wait_for_step(program, after=run.last_step())
        time.sleep(random.uniform(0, _LATEST_S))
        moment = "in a save" if run.is_saving() else "in a step"
    target = "controller"
    if random.random() < _WORKER_FRAC and run.kill_workers():
        target, moment = "worker", f"{moment}, then the controller"
        time.sleep(random.uniform(0, 1.5 * _STARTING_S))  # meanwhile the run continues by itself
    run.kill(program)
    return f"{target} killed {moment}"


def kill_in_a_step(run: Run, random: Random) -> str:
    """Send SIGKILL to the controller or to the worker in a step, while nothing is saved."""
    program = run.start({"checkpoint.every_steps": _RARE_STEPS})
    run.wait_for_step(program, after=run.last_step() + random.randrange(_RARE_STEPS))
    time.sleep(random.uniform(0, _LATEST_S))
    run.wait(lambda: not run.is_saving(), program)
    if random.random() < _WORKER_FRAC:
        run.kill_workers()
        time.sleep(random.uniform(0, 1.5 * _STARTING_S))
        run.kill(program)
        return "worker killed in a step, then the controller"
    run.kill(program)
    return "controller killed in a step"


def kill_between_renames(run: Run, random: Random) -> str:
    """Send SIGKILL in a commit, before the checkpoint has the name in `latest`."""
    which = random.choice(["first", "second"])
    program = run.start(program=(str(_HERE / "dying_writer.py"), which))
    status = run.end(program)
    if status != -signal.SIGKILL:
        run.fail(f"a kill in a commit ended with status {status}; see {run.log}")
    named = (run.dir / "checkpoints" / "latest").read_text().strip()
    if (run.dir / "checkpoints" / named).exists():
        run.fail(f"a kill in a commit came after {named} had its name")
    return f"killed in a commit, in the {which} save of a step"


def stop_and_kill(run: Run, random: Random) -> str:
    """Send a polite signal, and SIGKILL while the run parks its samples or saves them."""
    program = run.start()
    run.wait_for_step(program, after=run.last_step())
    time.sleep(random.uniform(0, _STEP_S))
    program.send_signal(random.choice([signal.SIGTERM, signal.SIGUSR1]))
    time.sleep(random.uniform(0, _STOPPING_S))
    moment = "in a save" if run.is_saving() else "as it was"
    if program.poll() is not None:
        moment = "after its end"
    run.kill(program)
    return f"stopped, and killed {moment}"


def stop_in_first_step(run: Run, random: Random) -> str:
    """Send a polite signal before this life has made a step: it must save and end by itself."""
    program = run.start()
    run.wait(run.is_training, program)
    time.sleep(random.uniform(0, _STEP_S))
    program.send_signal(signal.SIGTERM)
    status = run.end(program)
    if status != 0 or "stopped after step" not in run.output():
        run.fail(f"a stop in the first step ended with status {status}; see {run.log}")
    if not run.checkpoints():
        run.fail("a stop in the first step has saved nothing")
    return "stopped in its first step"


def go_back(run: Run, random: Random) -> str:
    """Resume an earlier checkpoint in the same directory, and send SIGKILL."""
    earlier = run.checkpoints()[:-1]
    if not earlier:
        return kill(run, random)
    chosen = random.choice(earlier)
    program = run.start({"resume": chosen.path})
    run.wait_for_step(program, after=chosen.step)
    time.sleep(random.uniform(0, _LATEST_S))
    run.kill(program)
    later = [one.step for one in run.checkpoints() if one.step > run.last_step() + 1]
    if later:
        run.fail(f"after going back to step {chosen.step} there are checkpoints of {later}")
    return f"went back to step {chosen.step}, and killed"


def lose_worker_elsewhere(run: Run, random: Random) -> str:
    """Use `resume=PATH` in a new directory, and kill a worker before its first own checkpoint."""
    if not run.checkpoints():
        return kill(run, random)
    origin, elsewhere = run.checkpoints()[-1], run.folder / "elsewhere"
    last, before = origin.step + 4, run.hashes()
    program = run.start(
        {
            "resume": origin.path,
            "hydra.run.dir": elsewhere,
            "checkpoint.every_steps": 10**6,
            "trainer.num_steps": last,
        }
    )
    run.wait(lambda: _last_step(elsewhere) > origin.step, program)
    run.kill_workers()
    status = run.end(program)
    steps = [row["step"] for row in rows_of(elsewhere) if row["step"] > origin.step]
    if status != 0 or steps != list(range(origin.step + 1, last + 1)):
        run.fail(f"a copy from step {origin.step} ended with status {status} and steps {steps}")
    if f"from {origin.path}" not in run.output():
        run.fail(f"the restart of a copy did not continue from {origin.path}; see {run.log}")
    _expect_unchanged(run, before, "a copy of it")
    shutil.rmtree(elsewhere, ignore_errors=True)
    return f"copied from step {origin.step}; the copy's worker killed"


def start_twice(run: Run, random: Random) -> str:
    """Start two programs at once: one continues, the other says who owns the directory; then
    send SIGKILL.
    """
    before = run.last_step()
    pair = [run.start(), run.start()]
    run.wait(lambda: any(each.poll() is not None for each in pair))
    ended = [each for each in pair if each.poll() is not None]
    others = [each for each in pair if each not in ended]
    if len(ended) != 1 or ended[0].returncode != 1 or _OWNED not in run.output():
        run.fail(f"of two programs {len(ended)} ended; see {run.log}")
    for each in others:
        run.wait_for_step(each, after=before)
        time.sleep(random.uniform(0, _LATEST_S))
        run.kill(each)
    return "started twice, and the one that continued killed"


def fail_to_write(run: Run, random: Random) -> str:
    """Make a checkpoint fail: training continues; then send SIGKILL."""
    error = random.choice(["memory", "type", "disk"])
    before = {one.step for one in run.checkpoints()}
    program = run.start(program=(str(_HERE / "failing_writer.py"), error))
    run.wait(lambda: _UNWRITTEN in run.output(), program)
    if program.poll() is not None or _UNWRITTEN not in run.output():
        run.fail(f"a writer that failed ({error}) ended the run; see {run.log}")
    # This life trains already: a first one has passed the step that `wait_for_step` knows it by.
    unwritten = max(before, default=0) + 1
    run.wait(lambda: run.last_step() > unwritten, program)
    time.sleep(random.uniform(0, _LATEST_S))
    run.kill(program)
    return f"could not write a checkpoint ({error}), continued, and killed"


def refuse(run: Run, random: Random) -> str:
    """Resume with settings that the checkpoint does not fit: no byte may change."""
    if not run.checkpoints():
        return kill(run, random)
    what, settings = random.choice(list(REFUSALS.items()))
    recover(run.dir / "checkpoints")
    before = run.hashes()
    status = run.end(run.start(settings(run)))
    if status != 1 or what not in run.output() or "Traceback" in run.output():
        run.fail(f"{what} was not refused by name (status {status}); see {run.log}")
    _expect_unchanged(run, before, "a refused resume")
    return f"refused: {what}"


def _expect_unchanged(run: Run, before: dict[str, str], what: str) -> None:
    now = run.hashes()
    changed = sorted(path for path in before.keys() | now if before.get(path) != now.get(path))
    if changed:
        run.fail(f"{what} has changed {changed[:5]}")


def _last_step(run_dir: Path) -> int:
    rows = rows_of(run_dir)
    return int(rows[-1]["step"]) if rows else -1


# How often each kind is drawn, relative to the others.
KINDS: dict[Callable[[Run, Random], str], int] = {
    kill: 5,
    kill_in_a_step: 10,
    kill_between_renames: 3,
    stop_and_kill: 3,
    stop_in_first_step: 2,
    go_back: 3,
    lose_worker_elsewhere: 1,
    start_twice: 2,
    fail_to_write: 3,
    refuse: 3,
}
