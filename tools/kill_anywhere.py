"""Ends real runs with SIGKILL at random moments, resumes them, and checks that nothing is lost.

    python tools/kill_anywhere.py --kills 50 --seed 7 [--output FOLDER] [key=value ...]

The run is the tiny recipe: real Ray, vLLM and FSDP2, a checkpoint after every step. Each life
begins with resume=auto and ends with SIGKILL to the controller or to the worker: while it starts,
in a step, in a save. The last life goes on to the end. Prints a line for each kill; the exit status
is 1, and the reasons are named, when a check fails. The same seed gives the same choices; moments
depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from april_rl.checkpointing.folder import saved
from april_rl.checkpointing.manifest import verify
from april_rl.errors import RunError

_STEPS_PER_KILL = 3
_MARK = "APRIL_RL_KILL_ANYWHERE"  # in the environment of everything that a run starts
_STARTING_FRAC, _STARTING_S = 0.2, 15.0  # kills while a run starts, and until when
_WORKER_FRAC = 0.3  # kills of the worker
_LATEST_S = 3.0  # after a new step
_GONE_S = 120.0  # until every process must have ended: Ray's agents try for 60 s to reach its GCS
_SHARED = "/dev/shm"
_LIFE_S = 600.0  # a life that has not made a step by then hangs


class KillAnywhere:
    """One run, its lives, and what was wrong with it."""

    def __init__(self, folder: Path, given: Sequence[str], *, kills: int, seed: int) -> None:
        """Use the run directory `folder` / run, and the settings `given` as key=value."""
        self.run_dir, self.failures = folder / "run", list[str]()
        self._given = given
        self._random, self._kills = random.Random(seed), kills
        self._num_steps = kills * _STEPS_PER_KILL + 2
        self._log = folder / "output.txt"
        self._num_lives = 0
        self._inodes = set[int]()  # of the shared memory that was open when something was killed

    def go(self) -> None:
        """Live as often as it says, and check everything; adds to `failures`."""
        with ThreadPoolExecutor(max_workers=self._kills + 1) as threads:
            checks = [threads.submit(self._check_processes, life) for life in self._lives()]
        for check in checks:
            check.result()
        self._check_shared_memory()
        self._check_rows()
        self._check_samples()

    def _lives(self) -> Iterator[int]:
        """Live and be killed, then live to the end; yields the number of each life that has ended.

        The next one begins at once, as a person would begin it, while processes of the last one
        may still be ending.
        """
        for number in range(1, self._kills + 1):
            started = time.monotonic()
            program = self._start()
            target, moment = self._kill(program)
            program.wait()
            yield self._num_lives
            self._check_checkpoints()
            print(
                f"kill {number}/{self._kills}: {target} {moment}, after "
                f"{time.monotonic() - started:.0f} s, at step {self._last_step()}",
                flush=True,
            )
            if self._last_step() >= self._num_steps:
                break
        if self._start().wait() != 0:
            self._fail(f"the last life did not end well; see {self._log}")
        yield self._num_lives
        self._check_checkpoints()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {
            "hydra.run.dir": self.run_dir,
            "resume": "auto",
            "trainer.num_steps": self._num_steps,
            "checkpoint.every_steps": 1,
            "evaluation.every": 10**6,
            "evaluation.max_prompts": 8,
            "tracking.wandb": "disabled",
            "tracking.save_samples_every": 1,
        }
        args = [sys.executable, "-m", "april_rl.train", "+recipe=tiny_cpu"]
        self._num_lives += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*args, *(f"{key}={value}" for key, value in settings.items()), *self._given],
                env={**os.environ, _MARK: self._mark(self._num_lives)},
                stdout=log,
                stderr=log,
            )

    def _kill(self, program: subprocess.Popen[bytes]) -> tuple[str, str]:
        """Kill the controller or the worker at a random moment; returns which, and when."""
        moment = "while it started"
        if self._random.random() < _STARTING_FRAC:
            time.sleep(self._random.uniform(0, _STARTING_S))
        else:
            before, deadline = self._last_step(), time.monotonic() + _LIFE_S
            while self._last_step() <= before and program.poll() is None:
                if time.monotonic() > deadline:
                    self._fail(f"no step within {_LIFE_S:g} s; see {self._log}")
                    break
                time.sleep(0.02)
            time.sleep(self._random.uniform(0, _LATEST_S))
            is_saving = any((self.run_dir / "checkpoints").glob(".step_*.partial"))
            moment = "in a save" if is_saving else "in a step"
        target = "controller"
        if self._random.random() < _WORKER_FRAC:
            ours = self._processes_to_kill()
            workers = [process for process in ours if "ray::Worker" in _name(process)]
            for worker in workers:
                worker.kill()
                target = "worker"
            if workers:  # the run goes on by itself for a while
                time.sleep(self._random.uniform(0, 2 * _STARTING_S))
                moment += ", then the controller"
        self._processes_to_kill()
        program.send_signal(signal.SIGKILL)
        return target, moment

    def _processes_to_kill(self) -> list[psutil.Process]:
        """Return the processes of this life, and remember what shared memory they have open."""
        found = _processes(self._mark(self._num_lives))
        self._inodes |= {inode for process in found for inode in _shared_inodes(process.pid)}
        return found

    def _last_step(self) -> int:
        rows = self._rows()
        return int(rows[-1]["step"]) if rows else -1

    def _rows(self) -> list[dict[str, float]]:
        """Return the rows of metrics.jsonl that were written to their end."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _mark(self, life: int) -> str:
        return f"{self.run_dir} {life}"

    def _check_processes(self, life: int) -> None:
        """Wait until no process of a life is left; those that stay are ended and reported."""
        deadline = time.monotonic() + _GONE_S
        while (left := _processes(self._mark(life))) and time.monotonic() < deadline:
            time.sleep(1.0)
        for process in left:
            self._fail(f"left behind by life {life}: {process.pid} {_name(process)}")
            process.kill()

    def _check_shared_memory(self) -> None:
        """Check that what was open at a kill has no name any more: nobody would ever remove it."""
        deadline = time.monotonic() + _GONE_S
        while (names := self._names_left()) and time.monotonic() < deadline:
            time.sleep(1.0)
        for name in sorted(names):
            self._fail(f"left behind: {_SHARED}/{name}")

    def _names_left(self) -> list[str]:
        with os.scandir(_SHARED) as entries:
            return [entry.name for entry in entries if entry.inode() in self._inodes]

    def _check_checkpoints(self) -> None:
        for one in saved(self.run_dir / "checkpoints"):
            try:
                verify(one.path)
            except RunError as error:
                self._fail(f"{one.path}: {error}")

    def _check_rows(self) -> None:
        """Check that every step is there once, and that the ledger adds up in each."""
        rows = self._rows()
        if [row["step"] for row in rows] != list(range(self._num_steps + 1)):
            self._fail(f"the steps in metrics.jsonl are {[row['step'] for row in rows]}")
        states = ("in_flight", "parked", "ready", "trained", "rejected", "dropped")
        for row in rows[1:]:
            if row["ledger/opened"] != sum(row[f"ledger/{state}"] for state in states):
                self._fail(f"the ledger of step {row['step']} does not add up")

    def _check_samples(self) -> None:
        """Check that along the surviving history no prompt was trained twice, and none skipped: all
        that were opened and not trained are left over.
        """
        trained: Counter[int] = Counter()
        for path in sorted((self.run_dir / "samples").glob("step_*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            trained.update({line["prompt_id"] for line in lines})
        twice = [prompt for prompt, count in trained.items() if count > 1]
        if twice:
            self._fail(f"trained more than once: prompts {twice[:5]}")
        leftover = self.run_dir / "samples" / "leftover.jsonl"
        lines = [json.loads(line) for line in leftover.read_text().splitlines()]
        left = {line["prompt_id"] for line in lines}
        opened = int(self._rows()[-1]["ledger/opened"])
        if trained.keys() | left != set(range(opened)):
            missing = set(range(opened)) - trained.keys() - left
            self._fail(f"of {opened} prompts these are lost: {sorted(missing)[:5]}")

    def _fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"FAILED: {what}", flush=True)


def _processes(mark: str) -> list[psutil.Process]:
    """Return every process with this mark in its environment that has not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(_MARK) == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _shared_inodes(pid: int) -> set[int]:
    """Return the inodes of the shared memory that a process has open. Its names will not do, for a
    semaphore is mapped under the temporary name that it was made with.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    return {int(line.split()[4]) for line in lines if f"{_SHARED}/" in line}


def _name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
        return " ".join([*(os.path.basename(word) for word in words[:3]), *words[3:]])[:120]
    except psutil.Error:
        return "?"


def main() -> int:
    """Run the test that the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="keep the run here")
    parser.add_argument("settings", nargs="*", help="key=value, beside those of the tiny recipe")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = (args.output or Path(folder)).resolve()
        output.mkdir(parents=True, exist_ok=True)
        test = KillAnywhere(output, args.settings, kills=args.kills, seed=args.seed)
        test.go()
    print(f"{args.kills} kills, seed {args.seed}: {len(test.failures)} checks failed")
    return 1 if test.failures else 0


if __name__ == "__main__":
    sys.exit(main())
