"""tools/cluster/slurm.sh, with stand-ins for Slurm's commands."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cluster.await_nodes import await_nodes
from command_line import rows_of, steps_of
from own_process import is_running, wait_until
from source_tree import ROOT

from april_rl.run.checkpointing.folder import begin, commit

ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
TWO_NODES = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-a,node-b"}
SCONTROL = 'if [ "$1" = show ]; then tr , "\\n" <<<"$3"; else echo "$@" >> {folder}/requeued; fi'
SIZES = "trainer.num_groups=4 rollout.group_size=4 evaluation.max_prompts=4 evaluation.every=100"


class Job:
    """Job 7 with the stand-ins in `folder`; `srun` is the text of its srun."""

    def __init__(self, folder: Path, *, srun: str, **variables: str) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "one"
        for name, text in (("srun", srun), ("scontrol", SCONTROL.format(folder=folder))):
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        own |= {"SLURM_JOB_ID": "7", "PYTHON": sys.executable, "STEPS_LOG": str(folder / "steps")}
        self.environment = {**kept, **own, **variables}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the script, by default with the arguments of a run."""
        given = arguments or (str(self.run_dir), "+recipe=tiny_cpu")
        return subprocess.Popen(
            ["bash", "tools/cluster/slurm.sh", *given],
            cwd=ROOT,
            env={key: value for key, value in self.environment.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self, *arguments: str, status: int) -> str:
        """Return what the script prints, which ends with `status`."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=900)
        assert process.returncode == status, output
        return output

    def has_trained(self, process: subprocess.Popen[str]) -> bool:
        assert process.poll() is None, process.communicate()[0]
        return (self.run_dir / "metrics.jsonl").exists() and bool(steps_of(self.run_dir))

    def requeued(self) -> str:
        said = self.folder / "requeued"
        return said.read_text().strip() if said.exists() else ""


def requeued(folder: Path, *, status: int, is_finished: bool | None, **variables: str) -> str:
    """Run a job whose run ends with `status`; return which job it requeues.

    The last checkpoint shows whether the run has finished; None means that there is no checkpoint.
    """
    job = Job(folder, srun=f"exit {status}", **variables)
    if is_finished is not None:
        name = "one_3" if variables else "one"
        begun = begin(folder / "runs" / name / "checkpoints", 5)
        commit(begun, step=5, about={"is_finished": is_finished}, records={}, required=())
    job.output(status=status)
    return job.requeued()


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
def test_a_job_is_requeued_if_its_run_stopped_normally_and_is_not_finished(
    tmp_path, status, is_finished, expected
):
    """Fails when a run that cannot start is requeued forever, or a stopped one is not."""
    assert requeued(tmp_path, status=status, is_finished=is_finished) == expected


def test_a_task_of_an_array_is_requeued_separately_and_has_its_own_run(tmp_path):
    """The last task has the same number as the array. Fails when the whole array is requeued."""
    assert requeued(tmp_path, status=0, is_finished=False, **ARRAY) == "requeue 7_3"


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        ({"SLURM_JOB_ID": ""}, (), "this is a job script; submit it: sbatch"),
        ({}, ("runs/one", "+recipe=tiny_cpu"), "with an absolute path; got: runs/one"),
        ({}, ("/runs/one",), "the arguments must be RUN_DIRECTORY +recipe=NAME"),
        ({"PYTHON": "/nowhere/python"}, (), "/nowhere/python does not exist; run `make setup`"),
        ({**TWO_NODES, "SLURM_JOB_NODELIST": "localhost,b"}, (), "means 127.0.0.1, which other"),
        ({**TWO_NODES, "SLURM_JOB_NODELIST": "a.invalid,b"}, (), "means no address, which other"),
    ],
)
def test_a_job_that_cannot_start_gives_the_reason(tmp_path, variables, arguments, said):
    output = Job(tmp_path, srun="exit 0", **variables).output(*arguments, status=2)
    assert output.startswith("slurm.sh: error: ")
    assert said in output


@pytest.mark.slow
def test_a_job_ends_when_ray_does_not_start(tmp_path):
    """Fails when it waits five minutes for a node that cannot join."""
    job = Job(tmp_path, srun="echo no port; exit 1", RAY_HEAD_IP="127.0.0.1", **TWO_NODES)
    assert "no port\nslurm.sh: error: Ray has ended on a node" in job.output(status=2)


def test_the_wait_for_a_cluster_that_never_replies_ends():
    with pytest.raises(SystemExit, match=r"after 0 s: runtime\.ray_address=127\.0\.0\.1:9: no Ray"):
        await_nodes("127.0.0.1:9", 2, 0.0)


@pytest.mark.soak
@pytest.mark.cpu_engine
def test_a_job_on_two_nodes_stops_at_its_signal_and_finishes_after_it_is_requeued(tmp_path):
    """Each node has one CPU and therefore one worker. Slurm's signal goes to every process of the
    steps.

    Fails when the signal ends Ray before the run has its checkpoint, when the script returns
    another status, or when a process of the cluster outlives it.
    """
    srun = f'exec {sys.executable} {Path(__file__).with_name("slurm_step.py")} "$@"'
    ray = {"RAY_HEAD_IP": "127.0.0.1", "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "200000000"}
    job = Job(tmp_path, srun=srun, **ray, **TWO_NODES)
    sizes = ["runtime.num_workers=2", "runtime.threads=1", *SIZES.split()]
    settings = [str(job.run_dir), "+recipe=tiny_cpu", *sizes]

    process = job.start(*settings, "trainer.num_steps=1000")
    wait_until(lambda: job.has_trained(process), within_s=240)
    started = psutil.Process(process.pid).children(recursive=True)
    for task in started:
        with suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
            if not any("slurm" in word for word in task.cmdline()):
                task.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "Ray has 2 of 2 nodes" in output
    assert "2 workers on cpu, 2 engines" in output
    assert job.requeued() == "requeue 7"
    wait_until(lambda: not any(is_running(each.pid) for each in started))
    tasks = (tmp_path / "steps").read_text().splitlines()
    assert [task.split(": ")[0] for task in tasks] == ["node-a", "node-b", "node-a"]

    (tmp_path / "requeued").unlink()
    steps = max(int(row["step"]) for row in rows_of(job.run_dir))
    output = job.output(*settings, f"trainer.num_steps={steps + 1}", status=0)
    assert "Ray has 2 of 2 nodes" in output
    assert rows_of(job.run_dir)[-1]["step"] == steps + 1
    assert job.requeued() == ""
    assert job.output(*settings, "trainer.num_steps=x", status=1)
