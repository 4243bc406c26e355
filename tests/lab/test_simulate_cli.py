"""`python -m april_rl simulate`: recorded runs, and error messages."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from report_runs import make_run
from source_tree import ROOT

from april_rl.__main__ import main
from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.outcome import Outcome
from april_rl.lab.simulator.simulation import Scenario, simulate

NUM_GROUPS, GROUP_SIZE, BUDGET = 8, 4, 600
SCENARIO = Scenario(
    cost=EngineCost(step_s=3e-3, sample_s=2e-5, context_token_s=6e-8, prefill_token_s=2e-5),
    length_of=Lognormal(median_tokens=80, sigma=0.9, correlation=0.3),
    num_groups=NUM_GROUPS,
    group_size=GROUP_SIZE,
    max_response_tokens=BUDGET,
    prompt_tokens=24,
    no_signal_frac=0.2,
    rest_s=0.5,
)
Row = dict[str, float]
SHORT = ("--steps", "3", "--warmup-steps", "2", "--num-groups", "4")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Return the run directory of 80 synchronous steps, and the results of their later half."""
    run_dir = make_run(
        tmp_path_factory.mktemp("run") / "run", scenario=SCENARIO, factor=1.0, num_steps=80
    )
    outcome = simulate(
        SCENARIO, over_sampling_factor=1.0, refill=False, num_steps=40, warmup_steps=40
    )
    return run_dir, outcome


def rows_of(tmp_path: Path, *arguments: str) -> list[Row]:
    path = tmp_path / "rows.json"
    assert main(["simulate", *arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert isinstance(rows, list)
    return rows


def message_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        status = main(["simulate", *arguments])
    except SystemExit as ended:  # argparse exits in this way
        status = int(ended.code or 0)
    return status, capsys.readouterr().err.strip().splitlines()[-1]


def test_a_recorded_run_simulates_to_its_own_step_time(recorded, tmp_path):
    """Within 5 %, including the update. Fails when the terms of the cost are swapped, groups of
    several steps are merged, or the rest of the step is left out.
    """
    run_dir, outcome = recorded
    rows = rows_of(tmp_path, "--run", str(run_dir), "--alpha", "1", "2", "--steps", "150")
    assert [row["mode"] for row in rows] == ["synchronous", "one-shot"]
    assert rows[0]["step_s"] == pytest.approx(outcome.step_s, rel=0.05)
    assert rows[0]["generated_tokens_per_s"] == pytest.approx(
        outcome.generated_tokens_per_s, rel=0.05
    )
    assert rows[1]["gain"] > 1.2
    assert 1 < rows[1]["step_gain"] < rows[1]["gain"]


def test_a_run_without_small_batches_is_reported_to_leave_their_cost_unknown(
    recorded, tmp_path, capsys
):
    """With refill at α > 1 all batches have nearly the same size. A synchronous run also has
    others.
    """
    copy = tmp_path / "run"
    shutil.copytree(recorded[0], copy)
    for rollout, is_doubtful in (
        ({}, False),
        ({"over_sampling_factor": 1.5, "refill": True}, True),
    ):
        config = OmegaConf.load(copy / "config.yaml")
        OmegaConf.save(OmegaConf.merge(config, {"rollout": rollout}), copy / "config.yaml")
        assert main(["simulate", "--run", str(copy), "--alpha", "1.5", "--steps", "2"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert ("What small batches cost is a guess" in printed) == is_doubtful


def copied(run_dir: Path, folder: Path, change: Callable[[Row], Row]) -> Path:
    """Copy a run, with what `change` returns for a row in it."""
    shutil.copytree(run_dir, folder / "run")
    path = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | change(row)) + "\n" for row in rows))
    return folder / "run"


def test_the_time_of_the_controller_is_part_of_a_rollout(recorded, tmp_path):
    def busy(row: Row) -> Row:
        whole_s = row.get("rollout/time_s", 0.0)
        return {"rollout/engine_s": 0.8 * whole_s, "rollout/controller_s": 0.1 * whole_s}

    folders = recorded[0], copied(recorded[0], tmp_path, busy)
    before, after = (
        rows_of(tmp_path, "--run", str(folder), "--alpha", "2", *SHORT)[0] for folder in folders
    )
    assert after["rollout_s"] == pytest.approx(before["rollout_s"] * 0.9 / 0.8, rel=0.01)


def test_options_replace_what_the_run_was_configured_with(recorded, tmp_path):
    run = ("--run", str(recorded[0]), "--alpha", "2", "--steps", "6", "--refill")
    plain = rows_of(tmp_path, *run)[1]
    assert plain["mode"] == "refill"
    assert plain["reprefill_per_generated_token"] > 0
    assert rows_of(tmp_path, *run, "--resume", "keep")[1]["reprefill_per_generated_token"] == 0
    filtered = rows_of(tmp_path, *run, "--filter", "--no-signal-frac", "0.5")[1]
    assert filtered["rejected_groups_per_step"] > 2
    assert rows_of(tmp_path, *run, "--num-groups", "4")[1]["step_s"] < plain["step_s"]
    assert rows_of(tmp_path, *run, "--max-staleness", "1")[1]["age_max"] <= 1
    masked = rows_of(tmp_path, *run, "--max-staleness", "1", "--on-stale", "mask")[1]
    assert masked["age_max"] > 1


@pytest.mark.parametrize(
    ("resumed", "kept", "resume", "does_keep"),
    [
        *((5, 0, "keep", False), (5, 3, "reprefill", True)),
        *((0, 0, "keep", True), (0, 0, "auto", True), (0, 0, "reprefill", False)),
    ],
)
def test_simulate_reads_from_the_run_whether_kv_caches_were_kept(
    recorded, tmp_path, resumed, kept, resume, does_keep
):
    """The setting decides for a run that parked nothing, where auto keeps on a CPU."""
    counts = {"rollout/resumed_samples": resumed, "rollout/kept_samples": kept}
    run_dir = copied(recorded[0], tmp_path, lambda _: counts)
    config = OmegaConf.load(run_dir / "config.yaml")
    config.rollout.resume, config.runtime.device = resume, "cpu"
    OmegaConf.save(config, run_dir / "config.yaml")
    rows = rows_of(tmp_path, "--run", str(run_dir), "--alpha", "2", "--steps", "6", "--refill")
    assert (rows[1]["reprefill_per_generated_token"] == 0) is does_keep


def test_every_factor_has_a_row(recorded, capsys, tmp_path):
    """Fails when a row is missing, or the gain belongs to the row before."""
    run = ("--run", str(recorded[0]), *SHORT, "--refill")
    rows = rows_of(tmp_path, *run, "--alpha", "3", "1.5", "--prompt-tokens", "16")
    assert [row["over_sampling_factor"] for row in rows] == [1.0, 1.5, 3.0]
    assert rows[0]["gain"] == 1
    for row in rows:
        gain = row["trained_samples_per_s"] / rows[0]["trained_samples_per_s"]
        assert row["gain"] == pytest.approx(gain)
    shown = capsys.readouterr().out
    assert shown.count("│ refill") == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--alpha", "0.5"), 2, "must be a number >= 1, got 0.5"),
        (("--steps", "0"), 2, "must be a number >= 1, got 0"),
        (("--run", "nowhere"), 1, "nowhere is not the directory of a run"),
        (("--alpha", "11"), 1, "--max-staleness must be >= 10 with --alpha 11"),
        (("--num-groups", "0"), 1, "num_groups must be >= 1, got 0"),
        (("--turns", "2", "--tool-sigma", "-1"), 1, "tool_sigma must be >= 0"),
    ],
)
def test_bad_input_ends_in_one_message(recorded, capsys, arguments, status, message):
    found_status, found = message_of(capsys, "--run", str(recorded[0]), *arguments)
    assert found_status == status
    assert message in found


def test_a_run_that_lacks_something_is_refused_by_name(capsys, recorded, tmp_path):
    """Fails when a missing part is replaced by a guess."""
    run_dir = recorded[0]
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    status, found = message_of(capsys, "--run", str(tmp_path))
    assert (status, "tracking.save_samples_every" in found) == (1, True)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00001.jsonl").write_text('{"prompt_id": 3}\n')
    assert (
        "step_00001.jsonl:1 is not a recorded sample"
        in message_of(capsys, "--run", str(tmp_path))[1]
    )
    (tmp_path / "samples" / "step_00001.jsonl").write_text('{"prompt_id": 3, "num_tokens": 9}\n')
    status, found = message_of(capsys, "--run", str(tmp_path))
    missing = "timeline holds no timeline of a step: run with tracking.save_samples_every=1"
    assert (status, missing in found) == (1, True)
    assert "--run is missing" in message_of(capsys)[1]


def test_help_appears_quickly():
    """It needs neither torch nor anything as heavy. Fails when the trainer is imported."""
    heavy = {"torch", "vllm", "ray", "transformers", "datasets", "wandb", "hydra"}
    script = f"import sys, april_rl.lab.commands.simulate; print(*({heavy!r} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "\n", "")


def test_an_outcome_is_the_mean_of_its_steps():
    arguments = {"over_sampling_factor": 1.0, "refill": False}
    both = simulate(SCENARIO, num_steps=2, warmup_steps=0, **arguments)
    second = simulate(SCENARIO, num_steps=1, warmup_steps=1, **arguments)
    first = simulate(replace(SCENARIO), num_steps=1, warmup_steps=0, **arguments)
    assert both.step_s == pytest.approx((first.step_s + second.step_s) / 2)
