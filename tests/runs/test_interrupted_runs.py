"""Runs that are interrupted from outside: what they do, how long they take to end, their message,
and that no process is left.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import yaml
from command_line import (
    check_ledger,
    command,
    environment,
    groups_of,
    refusal,
    rows_of,
    run,
    steps_of,
)
from own_process import is_running, wait_until

from april_rl.start.commands import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


class EndlessRun(NamedTuple):
    """A run in its own process group."""

    process: subprocess.Popen[str]
    run_dir: Path
    output: Path

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self) -> psutil.Process:
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
                if "ray::Worker" in "".join(process.cmdline()):
                    return process
        raise LookupError("the run has no worker")

    def rows(self) -> list[dict[str, float]]:
        return rows_of(self.run_dir) if (self.run_dir / "metrics.jsonl").exists() else []

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, "the run did not get there"
            time.sleep(0.05)

    def end_by_killing_the_worker(self, sent: signal.Signals, *, what: str) -> float:
        """Send the signal `sent` to the worker, check the run's message and that nothing is left;
        return the seconds it took.
        """
        children, worker = self.descendants(), self.worker()
        started = time.monotonic()
        worker.send_signal(sent)
        _, errors = self.process.communicate(timeout=600)
        took_s = time.monotonic() - started
        wait_until(lambda: not any(is_running(child.pid) for child in children))
        report = self.run_dir / "stall_report.txt"
        assert self.process.returncode == 1
        for said in (f"worker 0 (pid {worker.pid}", what, str(report)):
            assert said in errors
        assert f"worker 0 (pid {worker.pid}" in report.read_text()
        leftover = self.run_dir / "samples" / "leftover.jsonl"
        assert leftover.read_text(), "parked samples are kept"
        return took_s


@contextmanager
def endless_run(task: Path, run_dir: Path, *overrides: str) -> Iterator[EndlessRun]:
    endless = ("trainer.num_steps=100000", "evaluation.every=100000", "tracking.wandb=offline")
    output = run_dir.with_suffix(".out")
    with (
        output.open("w") as written,
        subprocess.Popen(
            command(task, run_dir, *endless, *overrides),
            stdout=written,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd=task,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield EndlessRun(process=process, run_dir=run_dir, output=output)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_a_lost_worker_restarts_the_run_and_ctrl_c_saves_it_and_leaves_no_process(task):
    """SIGINT goes to the whole foreground group while steps run, as from a terminal. Fails when the
    restart loses or repeats a step or a prompt, when a generated token is not in a checkpoint, or
    when the reward counts from 0 after the restart. The run trains with CISPO and GDPO.
    """
    even = "even: {function: reward_functions:even_length}"
    short = "short: {function: length, weight: 0.5, args: {start_tokens: 0, end_tokens: 96}}"
    counts = "counts: {function: reward_functions:CountsCalls, weight: 1e-6}"
    cispo = (
        *("algorithm=cispo", "trainer.num_minibatches=2", "algorithm.advantage=gdpo"),
        *("reward.function=math_verify", f"reward.functions={{{even}, {short}, {counts}}}"),
        *("checkpoint.every_steps=1", "tracking.save_samples_every=1"),
    )
    with endless_run(task, task / "run", *cispo) as run:
        run.wait_until((run.run_dir / "checkpoints" / "latest").exists)
        run.worker().kill()
        run.wait_until(lambda: any("restart/count" in row for row in run.rows()))
        said = refused_by_the_program(task, run.run_dir, *cispo, "resume=auto")
        assert f"belongs to a run that is still active (process {run.process.pid} on " in said
        number = len(run.rows())
        run.wait_until(lambda: len(run.rows()) > number)
        lost_by_the_worker = (run.run_dir / "samples" / "leftover.jsonl").read_text()
        children = run.descendants()
        assert children
        started = time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)
        run.process.communicate(timeout=115)
        took_s = time.monotonic() - started
    wait_until(lambda: not any(is_running(child.pid) for child in children))
    assert took_s < 110, "checkpoint.stop_deadline_s is 120; a tiny run needs some seconds"
    assert run.process.returncode == 130
    assert checkpoint.main(["verify", str(run.run_dir)]) == 0
    leftover = (run.run_dir / "samples" / "leftover.jsonl").read_text()
    assert leftover == lost_by_the_worker, "it is all saved"
    algorithm = yaml.safe_load((run.run_dir / "config.yaml").read_text())["algorithm"]
    assert (algorithm["loss"], algorithm["clip_low"]) == ("cispo", 1.0)
    assert all(row["loss/ratio_max"] > 1 for row in steps_of(run.run_dir))
    assert "restart 1 of runtime.max_restarts=3" in run.output.read_text()
    check_restarted(run.rows())
    trained = groups_of(run.run_dir)
    assert len(trained) == 4 * len(steps_of(run.run_dir)), "a prompt is trained more than once"
    assert len({group[0]["reward_parts"]["counts"] for group in trained}) == len(trained)
    check_gdpo(run.run_dir)
    before = content_of(run.run_dir)
    for wrong, message in (
        ("seed=7", "seed=7 is not the seed of the saved prompt stream"),
        ("lora.rank=2", "lora.rank=2, but the saved run had null"),
        (
            "engine.kv_cache_gib=9999",
            "this run does not fit into memory",
        ),  # after the worker's start
    ):
        one_process = "runtime.ray=false"
        assert message in refusal(task, task, *cispo, "resume=auto", one_process, wrong)
    assert content_of(run.run_dir) == before, "a refused resume changes nothing"


def check_gdpo(run_dir: Path) -> None:
    """Check that the advantages of the first step, four groups of four, follow from the parts of
    its rewards. Fails when the parts do not arrive, or lose their weights.
    """
    lines = (run_dir / "samples" / "step_00001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    sums = np.zeros((4, 4))
    for name, weight in (("even", 1.0), ("short", 0.5)):
        values = np.reshape([sample["reward_parts"][name] for sample in samples], (4, 4))
        centred = values - values.mean(axis=1, keepdims=True)
        sums += weight * centred / (values.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    expected = (sums / sums.std(ddof=1)).ravel()
    assert [sample["advantage"] for sample in samples] == pytest.approx(expected, abs=1e-4)
    assert np.ptp(expected) > 1


def refused_by_the_program(task: Path, run_dir: Path, *overrides: str) -> str:
    ran = run(command(task, run_dir, *overrides), task)
    assert ran.returncode == 1, ran.stdout
    return ran.stderr


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.soak
def test_a_run_that_loses_its_worker_restarts_as_often_as_allowed(task):
    """Here, once. Fails when a restart loses or repeats a step or is not reported; when the second
    loss does not end the run or gives the wrong reason; when parked samples are lost or a process
    is left.
    """
    once = ("checkpoint.every_steps=1", "runtime.max_restarts=1")
    with endless_run(task, task / "restarted", *once) as run:
        run.wait_until((run.run_dir / "checkpoints" / "latest").exists)
        run.worker().kill()
        run.wait_until(lambda: sum("restart/count" in row for row in run.rows()) == 1)
        number = len(run.rows())
        run.wait_until(lambda: len(run.rows()) > number)
        run.end_by_killing_the_worker(signal.SIGKILL, what="died")
    assert "restart 1 of runtime.max_restarts=1" in run.output.read_text()
    check_restarted(run.rows())


def check_restarted(rows: list[dict[str, float]]) -> None:
    """Check that a run that was restarted once has every step exactly once and has lost
    no group.
    """
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert [row["restart/count"] for row in rows if "restart/count" in row] == [1]
    check_ledger(rows[1:])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sent", "what", "within_s"),
    [(signal.SIGKILL, "died", 15), (signal.SIGSTOP, "was stopped", 25)],
)
def test_a_run_notices_a_lost_worker_in_seconds(task, sent, what, within_s):
    """Fails when the run waits for its abort deadline. test_worker_failures.py covers workers
    without an engine.
    """
    with endless_run(task, task / what.replace(" ", "_"), "runtime.max_restarts=0") as run:
        run.wait_until(lambda: len(run.rows()) >= 3)
        assert run.end_by_killing_the_worker(sent, what=what) < within_s
