"""Runs of TRL's trainer by `tests/trl/grpo_run.py`, and checks that hold for the rows
of every run.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from source_tree import ROOT

from april_rl.run.checkpointing.columns import read_state

WITH_TRL = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
]
PROGRAM = ROOT / "tests" / "trl" / "grpo_run.py"
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
GROUP_SIZE = 4
NUM_ROWS = 32


def launch(folder: Path, *, steps: int = 4, processes: int = 1, **settings: object) -> int:
    """Train and return the exit status; the file `printed` in the folder gets the output."""
    folder.mkdir(exist_ok=True)
    given = {"folder": str(folder), "steps": steps, **settings}
    launcher = (*LAUNCH, str(processes)) if processes > 1 else ()
    with (folder / "printed").open("wb") as printed:
        return subprocess.run(
            [sys.executable, *launcher, str(PROGRAM), json.dumps(given)],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            timeout=600,
            check=False,
        ).returncode


def run(folder: Path, **settings: object) -> dict:
    """Train in one process and return the results, with the `batches`."""
    return run_processes(folder, processes=1, **settings)[0]


def run_processes(folder: Path, *, processes: int, **settings: object) -> list[dict]:
    """Train and return the results of each process, with its `batches`."""
    status = launch(folder, processes=processes, **settings)
    assert status == 0, (folder / "printed").read_text(errors="replace")[-3000:]
    return [
        {
            **json.loads((folder / f"found_{rank}.json").read_text()),
            "batches": batches_of(folder, rank),
        }
        for rank in range(processes)
    ]


def batches_of(folder: Path, rank: int = 0) -> list[dict]:
    """Return rows and tokens of each batch that a process has trained, even in a killed run."""
    file = folder / f"batches_{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_of(found: dict) -> list[dict]:
    return [row for row in found["log"] if "loss" in row]


def rows_of(batches: list[dict]) -> list[int]:
    return [row for batch in batches for row in batch["rows"][::GROUP_SIZE]]


def opened_rows(batches: list[dict], checkpoint: Path, rank: int = 0) -> list[int]:
    """Return the rows that were trained in `batches` or are parked in the checkpoint."""
    state = read_state(checkpoint, f"april_rl_{rank}")
    assert not state["batch"], "all of the last batch is trained"
    buffer = state["collector"]["buffer"]
    parked = [group["prompt"]["columns"]["row"] for group in [*buffer["open"], *buffer["ready"]]]
    assert parked
    assert state["num_taken"] == len(parked) + len(rows_of(batches))
    return rows_of(batches) + parked


def check_every_row_once(batches: list[dict], checkpoint: Path) -> None:
    """Fail unless the rows were opened epoch after epoch, each trained once or parked."""
    rows = opened_rows(batches, checkpoint)
    num_epochs, others = divmod(len(rows), NUM_ROWS)
    expected = Counter({num_epochs: NUM_ROWS - others, num_epochs + 1: others})
    assert Counter(Counter(rows).values()) == +expected
