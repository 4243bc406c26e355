"""The command line, from the shell to the last file: real Ray, vLLM, FSDP2, reward pool, W&B."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from command_line import command, environment, run, run_with, write_task
from transformers import AutoModelForCausalLM

from april_rl.checkpointing.manifest import read_manifest
from april_rl.commands import checkpoint
from april_rl.tracking.keys import missing

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
LEDGER_STATES = ("in_flight", "parked", "ready", "trained", "rejected", "dropped")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory) -> Path:
    """The directory of a run over-sampled, so that groups are parked and resumed."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    settings = ("tracking.wandb=offline", "learner.offload=all")
    done = run(command(task, run_dir, *settings), run_dir.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    (run_dir.parent / "stdout").write_text(done.stdout)
    return run_dir


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_a_run_leaves_true_metrics_and_a_checkpoint_that_loads(task, finished):
    """Fails when a stage reports nothing."""
    rows = metrics_of(finished)
    steps = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert missing(steps[-1]) == []
    for row in steps:
        assert row["ledger/opened"] == sum(row[f"ledger/{state}"] for state in LEDGER_STATES)
        assert row["ledger/in_flight"] == 0
        assert row["ledger/trained"] == 4 * row["step"]
        if row["rollout/generated_tokens_per_s"]:
            assert row["mismatch/logprob_abs_mean"] <= 0.02
        ages = [row[key] for key in row if key.startswith("staleness/token_frac_age_")]
        assert sum(ages) == pytest.approx(1.0)
        assert sum(ages[1:]) == pytest.approx(row["staleness/off_policy_token_frac"])
    assert max(row["staleness/age_max"] for row in steps) >= 1, "nothing was resumed"
    assert sum(row["rollout/resumed_samples"] for row in steps) > 0
    model = AutoModelForCausalLM.from_pretrained(finished / "exports" / "step_4")
    start = AutoModelForCausalLM.from_pretrained(task / "model")
    moved = zip(model.parameters(), start.parameters(), strict=True)
    assert any((a != b).any() for a, b in moved)
    assert list(finished.glob("wandb/offline-run-*"))


def test_a_run_says_which_of_its_settings_the_device_ignores(finished):
    """As they were given. Fails when they are looked at after they have been settled."""
    assert "learner.offload=all has no effect on CPU" in (finished.parent / "stdout").read_text()


def test_the_checkpoint_of_a_run_can_be_looked_into(finished, capsys):
    """Fails when figures of the ledger, the parked groups or the files are not those of the run."""
    last = finished / "checkpoints" / "step_4"
    ledger = read_manifest(last).about["ledger"]
    assert checkpoint.main(["list", str(finished)]) == 0
    assert f"{last}  " in capsys.readouterr().out.splitlines()[-1]
    assert checkpoint.main(["show", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "step 4 of 4" in shown
    assert f"ledger     {metrics_of(finished)[-1]['ledger/opened']:.0f} opened" in shown
    assert f"parked     {len(ledger['live']['parked'])} groups with " in shown
    assert f"ready      {len(ledger['live']['ready'])} groups with " in shown
    assert checkpoint.main(["verify", str(last)]) == 0
    assert "5 files are as they were written" in capsys.readouterr().out
    assert checkpoint.main(["prune", str(finished), "keep_last=1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["show", "nowhere"], 1, "nowhere has no folder checkpoints"),
        (["show"], 2, "one PATH"),
        (["burn", "nowhere"], 2, "give one of show"),
        (["prune", "nowhere", "keep_last=0"], 2, "keep_last must be a number >= 1, got 0"),
    ],
)
def test_a_checkpoint_command_that_makes_no_sense_is_refused(arguments, status, message, capsys):
    """Fails when a traceback answers."""
    assert checkpoint.main(arguments) == status
    assert message in capsys.readouterr().err


def test_a_checkpoint_starts_another_run_on_a_mixture(task, finished, tmp_path):
    """So vLLM, transformers and the learner load what a run exports, and a run has sources."""
    again = command(
        task,
        tmp_path / "again",
        "trainer.num_steps=1",
        f"model.path={finished / 'exports' / 'step_4'}",
        "trainer.num_groups=4",
        "data.path=???",
        f"+data.sources.sums={{path: {task / 'sums.jsonl'}, weight: 3}}",
        f"+data.sources.asked={{path: {task / 'sums.jsonl'}, instruction: '?'}}",
        "rollout.over_sampling_factor=1",
    )
    done = run(again, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    row = metrics_of(tmp_path / "again")[1]
    assert row["mismatch/logprob_abs_mean"] <= 0.02
    assert (row["source/sums/groups"], row["source/asked/groups"]) == (3, 1)
    means = row["source/sums/reward_mean"], row["source/asked/reward_mean"]
    assert (3 * means[0] + means[1]) / 4 == pytest.approx(row["reward/mean"])


def test_the_controller_loads_no_engine():
    """Importing all of the controller's side leaves vllm out, and CUDA untouched."""
    code = (
        "import april_rl.trainer, sys, torch; assert 'vllm' not in sys.modules; "
        "assert not torch.cuda.is_initialized(); print('light')"
    )
    done = run([sys.executable, "-c", code], Path.cwd())
    assert done.stdout.strip() == "light", done.stderr


@contextmanager
def endless_run(task: Path, tmp_path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own, once it has made some steps."""
    endless = ("trainer.num_steps=100000", "evaluation.every=100000", "tracking.wandb=offline")
    args = command(task, tmp_path / "run", *endless, *more)
    with subprocess.Popen(
        args,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=tmp_path,
        text=True,
        start_new_session=True,
    ) as process:
        path = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        try:
            while not path.exists() or len(path.read_text().splitlines()) < 3:
                assert process.poll() is None, "the run ended by itself"
                assert time.monotonic() < deadline, "the run did not start"
                time.sleep(0.2)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.alone
def test_ctrl_c_saves_the_run_ends_it_and_leaves_no_process(task, tmp_path):
    """SIGINT to the whole foreground group, as a terminal sends it, while steps are running. Fails
    when what was generated is not in a checkpoint.
    """
    with endless_run(task, tmp_path) as process:
        children = descendants(process.pid)
        assert children
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        took_s = time.monotonic() - started
    _, alive = psutil.wait_procs(children, timeout=10)
    assert took_s < 60, "checkpoint.stop_deadline_s is 120, a tiny run needs some seconds"
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert process.returncode == 130
    assert checkpoint.main(["verify", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "samples" / "leftover.jsonl").exists(), "it is all saved"


def test_a_run_that_loses_its_worker_goes_on_by_itself(task, tmp_path):
    """Fails when a restart loses a step or makes one twice, leaves a process behind, or says
    nothing of it.
    """
    killed: list[psutil.Process] = []

    def kill_worker() -> None:
        """As soon as a checkpoint is there."""
        if killed or not (tmp_path / "run" / "checkpoints" / "latest").exists():
            return
        [program] = [
            process
            for process in psutil.Process().children()
            if f"hydra.run.dir={tmp_path / 'run'}" in process.cmdline()
        ]
        for process in program.children(recursive=True):
            if "ray::Worker" in "".join(process.cmdline()):
                process.kill()
                killed.append(process)

    args = command(task, tmp_path / "run", "checkpoint.every_steps=1", "trainer.num_steps=6")
    done = run_with(kill_worker, args, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(killed) == 1
    assert "restart 1 of runtime.max_restarts=3" in done.stdout
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["restart/count"] for row in rows if "restart/count" in row] == [1]
    for row in rows[1:]:
        assert row["ledger/opened"] == sum(row[f"ledger/{state}"] for state in LEDGER_STATES)
        assert row["ledger/trained"] == 4 * row["step"]


@pytest.mark.alone
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_killed_or_stopped_ends_the_run_with_a_report_and_no_process(task, tmp_path, sent):
    """To the actor's process while steps are running. Fails when the run waits for its abort
    deadline, when what is parked is lost, or when the message is another than what happened.
    """
    with endless_run(task, tmp_path, "runtime.max_restarts=0") as process:
        children = descendants(process.pid)
        worker = next(p for p in children if "ray::Worker" in "".join(p.cmdline()))
        started = time.monotonic()
        worker.send_signal(sent)
        _, errors = process.communicate(timeout=60)
        took_s = time.monotonic() - started
    _, alive = psutil.wait_procs(children, timeout=5)
    assert process.returncode == 1
    assert took_s < (15 if sent == signal.SIGKILL else 25)
    what = "died" if sent == signal.SIGKILL else "was stopped"
    report = tmp_path / "run" / "stall_report.txt"
    assert f"worker 0 (pid {worker.pid}" in errors
    assert what in errors
    assert str(report) in errors
    assert f"worker 0 (pid {worker.pid}" in report.read_text()
    assert (tmp_path / "run" / "samples" / "leftover.jsonl").read_text(), "parked samples are kept"
    assert not alive, [p.cmdline() for p in alive]
