"""Checks after each life of a run, and at its end."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from april_rl.errors import RunError
from april_rl.run.checkpointing.manifest import verify
from kills.run import SHARED, Run, name_of, processes, rows_of

# Time until every process must have ended: Ray's agents try for 60 s to reach its GCS.
_GONE_S = 120.0
_STATES = ("in_flight", "parked", "ready", "trained", "rejected", "dropped")


def check_processes(run: Run, life: int) -> None:
    """Wait until no process of a life is left; end and report those that stay."""
    _wait_until_gone(lambda: processes(run.mark(life)))
    for process in processes(run.mark(life)):
        run.fail(f"left behind by life {life}: {process.pid} {name_of(process)}")
        process.kill()


def check_shared_memory(run: Run) -> None:
    """Check that shared memory that was open at a kill has lost its name: no process would ever
    remove it.
    """

    def names() -> list[str]:
        with os.scandir(SHARED) as entries:
            return [entry.name for entry in entries if entry.inode() in run.inodes]

    _wait_until_gone(names)
    for name in sorted(names()):
        run.fail(f"left behind: {SHARED}/{name}")


def check_calls(run: Run) -> None:
    """Check the log of the environment's tool, if there is one: no call occurs twice, unless it is
    marked as a further attempt. An attempt that ended before it wrote its line is missing from the
    log.
    """
    log = run.given.get("environment.args.log")
    if log is None:
        return
    calls = [line.split() for line in Path(log).read_text().splitlines()]
    attempts = defaultdict[str, list[int]](list)
    for key, attempt in calls:
        attempts[key].append(int(attempt))
    wrong = [key for key, made in attempts.items() if made != sorted(set(made))]
    if wrong or not calls:
        run.fail(f"{len(wrong)} of {len(attempts)} calls were made twice: {wrong[:5]}")
    repeated = sum(len(made) > 1 for made in attempts.values())
    print(f"{len(attempts)} calls of the tool, {repeated} of them with a further attempt")


def _wait_until_gone(left: Callable[[], Iterable[object]]) -> None:
    deadline = time.monotonic() + _GONE_S
    while left() and time.monotonic() < deadline:
        time.sleep(2.0)


def check_checkpoints(run: Run) -> None:
    """Check every byte of every checkpoint against its manifest."""
    for one in run.checkpoints():
        try:
            verify(one.path)
        except RunError as error:
            run.fail(f"{one.path}: {error}")


def check_rows(run: Run) -> None:
    """Check that every step occurs once, and that the ledger adds up in each."""
    rows = rows_of(run.dir)
    if [row["step"] for row in rows] != list(range(run.num_steps + 1)):
        run.fail(f"the steps in metrics.jsonl are {[row['step'] for row in rows]}")
    for row in rows[1:]:
        if row["ledger/opened"] != sum(row[f"ledger/{state}"] for state in _STATES):
            run.fail(f"the ledger of step {row['step']} does not add up")


def check_samples(run: Run) -> None:
    """Check that along the surviving history no prompt was trained twice or skipped: every prompt
    that was opened but not trained must be left over.
    """
    trained: Counter[int] = Counter()
    for path in sorted((run.dir / "samples").glob("step_*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        trained.update({line["prompt_id"] for line in lines})
    twice = [prompt for prompt, count in trained.items() if count > 1]
    if twice:
        run.fail(f"trained more than once: prompts {twice[:5]}")
    lines = [
        json.loads(line)
        for line in (run.dir / "samples" / "leftover.jsonl").read_text().splitlines()
    ]
    left = {line["prompt_id"] for line in lines}
    opened = int(rows_of(run.dir)[-1]["ledger/opened"])
    if trained.keys() | left != set(range(opened)):
        missing = set(range(opened)) - trained.keys() - left
        run.fail(f"of {opened} prompts these are lost: {sorted(missing)[:5]}")
