"""W&B's offline records, read back from its files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def wandb_folders(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def wandb_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return everything recorded in them, in order."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]
    printed = [
        subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True).stdout
        for folder in wandb_folders(run_dir)
    ]
    return [json.loads(line) for text in printed for line in text.splitlines()]


def check_one_run(run_dir: Path, rows: list[dict[str, Any]], *, num_folders: int) -> list[int]:
    """Check that this many folders hold one run of W&B, with the values of `rows` and every step
    only once; return its steps.
    """
    assert len(wandb_folders(run_dir)) == num_folders
    records = wandb_records(run_dir)
    assert len({record["run"]["run_id"] for record in records if "run" in record}) == 1
    items = [record["history"]["item"] for record in records if "history" in record]
    sent = [item for item in items if "ledger/opened" in item]
    steps = [item["step"] for item in sent]
    assert steps == sorted(set(steps))
    written = {row["step"]: row for row in rows}
    for item in sent:
        for key in ("ledger/opened", "reward/mean"):
            assert item[key] == pytest.approx(written[item["step"]][key]), key
    return steps
