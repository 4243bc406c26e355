"""What W&B has recorded offline, read back from its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def wandb_folders(run_dir: Path) -> list[Path]:
    """Return the folders that W&B made in a run directory, oldest first."""
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def wandb_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return everything recorded in them, in order."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]
    printed = [
        subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True).stdout
        for folder in wandb_folders(run_dir)
    ]
    return [json.loads(line) for text in printed for line in text.splitlines()]
