"""Runs that were killed and resumed, by what they train and with how many workers."""

from collections import Counter

import pytest
from command_line import check_ledger, command, groups_of, run, run_until_killed, steps_of
from equal_runs import SETTINGS, check_equal
from source_tree import TESTS
from two_worker_runs import has_row

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine, pytest.mark.soak]
ONE, TWO = "runtime.num_workers=1", "runtime.num_workers=2"
SPLIT = "engine.tensor_parallel_size=2"


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(("lora.rank=4",), id="adapters"),
        pytest.param(("lora.rank=4", "lora.sync=adapter"), id="adapters_alone"),
        pytest.param(
            (TWO, SPLIT, "lora.rank=4", "lora.sync=adapter"),
            id="adapters_alone_in_one_engine_of_two_workers",
        ),
        pytest.param(("data.path={folder}/few.jsonl",), id="in_the_second_epoch"),
        pytest.param((TWO, SPLIT), id="one_engine_of_two_workers"),
        pytest.param((TWO, "algorithm=dapo", "learner.offload=all"), id="two_engines"),
        pytest.param(("engine.args.async_scheduling=true",), id="asynchronous_scheduling"),
    ],
)
def test_a_killed_and_resumed_run_equals_the_undisturbed_one(task, tmp_path, own):
    """Bit-identical after a kill in the fourth step. Fails when a checkpoint lacks an adapter, the
    position in an epoch, or what a rank holds.
    """
    few = (task / "sums.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "few.jsonl").write_text("".join(few))
    own = [setting.format(folder=tmp_path) for setting in own]
    every = ("checkpoint.every_steps=2", "checkpoint.every_minutes=null", *own)
    first, second = (
        command(task, tmp_path / name, *SETTINGS, *every) for name in ("first", "second")
    )
    done = run(first, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    run_until_killed(second, tmp_path, lambda: has_row(tmp_path / "second", step=3))
    done = run([*second, "resume=auto"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(line.startswith("resumed from ") for line in done.stdout.splitlines())
    check_equal(tmp_path / "first", tmp_path / "second")


@pytest.mark.parametrize("lives", [(ONE, TWO, ONE), (TWO, f"{TWO} {SPLIT}", ONE)])
@pytest.mark.parametrize("resume", ["keep", "reprefill"])
def test_a_run_resumes_with_other_workers(task, tmp_path, lives, resume):
    """Three lives of three steps. Fails when a step, a prompt or a token is lost or repeated.

    Kept KV caches end with their process, so parked samples are then prefilled again.
    """
    for number, life in enumerate(lives, start=1):
        lived = command(
            task,
            tmp_path / "run",
            f"trainer.num_steps={3 * number}",
            f"rollout.resume={resume}",
            "tracking.save_samples_every=1",
            "resume=auto",
            *life.split(),
        )
        done = run(lived, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("resumed from " in done.stdout) == (number > 1)
        changed = f"trainer.num_steps from {3 * (number - 1)} to {3 * number}"
        assert (changed in done.stdout) == (number > 1)
    rows = steps_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 10))
    check_ledger(rows)
    for row in rows:
        assert row.get("mismatch/logprob_abs_mean", 0) <= 0.02
    resumed = sum(rows[first]["rollout/resumed_samples"] for first in (3, 6))
    assert resumed > 0, "a new life resumes what an earlier one parked"
    trained = Counter(group[0]["prompt_id"] for group in groups_of(tmp_path / "run"))
    assert len(trained) == 36
    assert set(trained.values()) == {1}


def test_a_run_whose_engine_raises_restarts_by_itself(task, tmp_path):
    """The error is planted into vLLM in the worker, in about the third step. Fails when the run
    ends, or a step, a prompt or a sample is lost or repeated.
    """
    here, fault = TESTS, tmp_path / "fault"
    done = run(
        command(
            task,
            tmp_path / "run",
            "trainer.num_steps=8",
            "evaluation.every=100",
            "checkpoint.every_steps=1",
            "tracking.save_samples_every=1",
        ),
        tmp_path,
        PYTHONPATH=f"{here / 'planted'}:{here}",
        FAULT_STEP="300",
        FAULT_FILE=str(fault),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert fault.exists()
    assert "illegal memory access" in done.stdout
    assert "restart 1 of runtime.max_restarts=3" in done.stdout
    rows = steps_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["restart/count"] for row in rows if "restart/count" in row] == [1]
    check_ledger(rows)
    trained = Counter(group[0]["prompt_id"] for group in groups_of(tmp_path / "run"))
    assert set(trained.values()) == {1}
    assert len(trained) == 32
