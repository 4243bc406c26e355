"""Whole runs by the dozen, for `make soak`: every combination of settings and every
kind of worker.
"""

import math

import pytest
from command_line import check_ledger, command, run, run_all, steps_of
from equal_runs import SETTINGS, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine, pytest.mark.soak]
ALGORITHMS = "algorithm=grpo,dapo,dr_grpo,gspo,cispo,dppo"
SWEEPS = {
    "synchronous and one-shot": (
        ALGORITHMS,
        "rollout.refill=false",
        "rollout.over_sampling_factor=1,2",
    ),
    "refill": (ALGORITHMS, "rollout.over_sampling_factor=1.5"),
    "two minibatches with a reference": (
        ALGORITHMS,
        "trainer.num_minibatches=2",
        "algorithm.kl=k2,k3",
        "algorithm.kl_coefficient=0.05",
    ),
    "compiled functions": (
        "learner.fused=true",
        "runtime.num_workers=1,2",
        "algorithm.kl=k3",
        "algorithm.kl_coefficient=0.05",
    ),
    "adapters, stale tokens, parked samples": (
        "lora.rank=null,4",
        "rollout.on_stale=finish,mask",
        "rollout.resume=keep,reprefill",
        "rollout.max_staleness=1",
    ),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_every_combination_of_settings_trains(task, tmp_path, name):
    """Each combination has its folder in the sweep. Fails when one of them ends early, trains
    nothing, leaves its engine running, or loses a group.
    """
    chosen = SWEEPS[name]
    swept = command(task, tmp_path / "unused", "hydra.sweep.dir=sweep", *chosen)
    done = run([*swept, "--multirun"], tmp_path, timeout_s=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    folders = [path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]
    assert len(folders) == math.prod(len(setting.split(",")) for setting in chosen)
    for folder in folders:
        steps = steps_of(folder)
        assert len(steps) == 4
        check_ledger(steps)
        for row in steps:
            assert row["loss/grad_norm"] > 0
            assert row.get("mismatch/logprob_abs_mean", 0) <= 0.02


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("resume", ["keep", "reprefill"])
def test_equal_settings_give_equal_samples_metrics_and_weights(task, tmp_path, workers, resume):
    """Bit-identical, although the two runs slow each other down. test_runs.py has two workers and a
    kill.
    """
    own = (f"rollout.resume={resume}", f"runtime.num_workers={workers}", "runtime.threads=2")
    programs = [command(task, tmp_path / name, *SETTINGS, *own) for name in ("first", "second")]
    for done in run_all(programs, tmp_path):
        assert done.returncode == 0, done.stderr[-3000:]
    rows = check_equal(tmp_path / "first", tmp_path / "second")
    kept = sum(row.get("rollout/kept_samples", 0) for row in rows)
    assert (kept > 0) == (resume == "keep")
