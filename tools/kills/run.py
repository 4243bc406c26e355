"""A run directory, the programs that work in it, and their leftovers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from april_rl.run.checkpointing.folder import Saved, list_saved
from april_rl.run.checkpointing.run_lock import FILE as LOCK

SHARED = Path("/dev/shm")
_MARK = "APRIL_RL_KILL_ANYWHERE"  # environment variable of everything that a run starts
_LIFE_S = 600.0  # a longer life counts as hung
_POLL_S = 0.02
_TRAIN = ("-m", "april_rl.train")
_RECIPE = {
    "model.path": "builtin:tiny",
    "data.path": "builtin:arithmetic",
}  # the values in tiny_cpu


class Run:
    """One run, and its faults."""

    def __init__(self, folder: Path, given: Sequence[str], *, num_steps: int) -> None:
        """Use the run directory `folder` / run, and the settings `given` as key=value."""
        self.folder, self.dir = folder, folder / "run"
        self.num_steps = num_steps
        self.failures = list[str]()
        self.num_lives = 0
        self.inodes = set[int]()  # shared memory that was open when a process was killed
        self.given = dict(each.split("=", 1) for each in given if "=" in each)
        self._removed = [each for each in given if "=" not in each]
        self.log = folder / "output.txt"
        self._began_at = 0  # where the output of this life begins, in bytes

    def begin_life(self) -> None:
        """Start the next life: processes started from now on belong to it."""
        self.num_lives += 1
        self._began_at = self.log.stat().st_size if self.log.exists() else 0

    def setting(self, key: str) -> str:
        """Return a setting of the run that is neither the tool's nor a default."""
        return self.given.get(key) or _RECIPE[key]

    def start(
        self, changed: Mapping[str, object] | None = None, *, program: Sequence[str] = _TRAIN
    ) -> subprocess.Popen[bytes]:
        """Start training in the run directory with resume=auto, or as `changed` says."""
        settings = {
            "hydra.run.dir": self.dir,
            "resume": "auto",
            "trainer.num_steps": self.num_steps,
            "checkpoint.every_steps": 1,
            "checkpoint.keep_last": 3,
            "evaluation.every": 10**6,
            "evaluation.max_prompts": 8,
            "tracking.backends": "[]",
            "tracking.save_samples_every": 1,
        }
        settings |= self.given | dict(changed or {})
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, *program, "+recipe=tiny_cpu", *self._removed),
                    *(f"{key}={value}" for key, value in settings.items()),
                ],
                env={**os.environ, _MARK: self.mark(self.num_lives)},
                stdout=log,
                stderr=log,
            )

    def mark(self, life: int) -> str:
        """Return the mark in the environment of a life's processes."""
        return f"{self.dir} {life}"

    def output(self) -> str:
        """Return what the programs of this life have printed."""
        with self.log.open("rb") as log:
            log.seek(self._began_at)
            return log.read().decode(errors="replace")

    def wait(
        self, until: Callable[[], bool], program: subprocess.Popen[bytes] | None = None
    ) -> bool:
        """Wait for a condition; return whether it held before `program` ended."""
        deadline = time.monotonic() + _LIFE_S
        while not until():
            if program is not None and program.poll() is not None:
                return until()
            if time.monotonic() > deadline:
                self.fail(f"life {self.num_lives} waits forever; see {self.log}")
                return False
            time.sleep(_POLL_S)
        return True

    def wait_for_step(self, program: subprocess.Popen[bytes], *, after: int) -> bool:
        """Wait for the row of a step later than `after`, in this life."""
        if not self.wait(lambda: self.is_training(), program):
            return False
        return self.wait(lambda: self.last_step() > after, program)

    def is_training(self) -> bool:
        """Return whether this life has continued from a checkpoint, or evaluated a new policy."""
        return "resumed from" in self.output() or self.last_step() == 0

    def end(self, program: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a program; return its exit status."""
        try:
            return program.wait(_LIFE_S)
        except subprocess.TimeoutExpired:
            self.fail(f"life {self.num_lives} did not end within {_LIFE_S:g} s; see {self.log}")
            self.kill(program)
            return program.wait()

    def kill(self, program: subprocess.Popen[bytes]) -> None:
        """End a program with SIGKILL; remember what shared memory its processes have open."""
        for process in processes(self.mark(self.num_lives)):
            self.inodes |= _shared_inodes(process.pid)
        program.kill()
        program.wait()

    def kill_workers(self) -> bool:
        """End the workers with SIGKILL; return whether there was one."""
        ours = processes(self.mark(self.num_lives))
        workers = [process for process in ours if "ray::Worker" in name_of(process)]
        for worker in workers:
            self.inodes |= _shared_inodes(worker.pid)
            worker.kill()
        return bool(workers)

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl, or -1."""
        rows = rows_of(self.dir)
        return int(rows[-1]["step"]) if rows else -1

    def checkpoints(self) -> list[Saved]:
        """Return the checkpoints, the earliest first."""
        return list(list_saved(self.dir / "checkpoints"))

    def is_saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        return any((self.dir / "checkpoints").glob(".step_*.partial"))

    def hashes(self) -> dict[str, str]:
        """Return a hash of every file in the run directory except the lock, which any program
        removes after its owner was killed.
        """
        files = [path for path in self.dir.rglob("*") if path.is_file() and path.name != LOCK]
        return {
            str(path.relative_to(self.dir)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        }

    def fail(self, what: str) -> None:
        """Record and print a fault."""
        self.failures.append(what)
        print(f"FAILED: {what}", flush=True)


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl that were written to their end."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def processes(mark: str) -> list[psutil.Process]:
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


def name_of(process: psutil.Process) -> str:
    """Return the command of a process, without its folder."""
    try:
        words = process.cmdline()
        return " ".join([*(os.path.basename(word) for word in words[:3]), *words[3:]])[:120]
    except psutil.Error:
        return "?"


def _shared_inodes(pid: int) -> set[int]:
    """Return the inodes of the shared memory that a process has open. Names do not work, because
    a semaphore is mapped under the temporary name that it was made with.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # the process has ended
        return set()
    return {int(line.split()[4]) for line in lines if f"{SHARED}/" in line}
