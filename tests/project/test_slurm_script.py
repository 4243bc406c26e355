"""The job script of docs/checkpoints.md, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from source_tree import ROOT

from april_rl.checkpointing.folder import begin, commit

SCRIPT = re.search(r"#!/bin/bash\n.*?(?=```)", (ROOT / "docs/checkpoints.md").read_text(), re.S)
ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


def requeued(folder: Path, *, status: int, is_finished: bool | None, **variables: str) -> str:
    """Run the script in a job 7 whose run ends with `status`; return which job it requeues. The
    last checkpoint says whether the run has finished; None: there is none.
    """
    assert SCRIPT is not None
    (folder / "script").write_text(SCRIPT[0].replace("/shared", str(folder)))
    said = folder / "requeued"
    for name, text in (("srun", f"exit {status}"), ("scontrol", f'echo "$@" >> {said}')):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    if is_finished is not None:
        name = "one_3" if variables else "one"
        begun = begin(folder / "runs" / name / "checkpoints", 5)
        commit(begun, step=5, about={"is_finished": is_finished}, records={}, required=())
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    command = ["bash", str(folder / "script")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status
    return said.read_text().strip() if said.exists() else ""


@pytest.mark.parametrize(
    ("status", "is_finished", "expected"),
    [
        (0, False, "requeue 7"),
        (0, True, ""),
        (1, False, ""),
        (1, None, ""),
        (130, False, ""),
        (143, None, ""),
    ],
)
def test_a_job_is_requeued_if_its_run_stopped_in_order_and_is_not_finished(
    tmp_path, status, is_finished, expected
):
    """Fails when a run that cannot start is requeued for ever, or a stopped one is not."""
    assert requeued(tmp_path, status=status, is_finished=is_finished) == expected


def test_a_task_of_an_array_is_requeued_alone_and_has_its_own_run(tmp_path):
    """The last task has the array's number as its own. Fails when that number is requeued."""
    assert requeued(tmp_path, status=0, is_finished=False, **ARRAY) == "requeue 7_3"
