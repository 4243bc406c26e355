"""Whole runs through the command; each setting is recognised by an effect that only it has."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import check_ledger, command, groups_of, refusal, rows_of, steps_of
from exported_adapters import check_merged
from metric_keys import missing, undescribed_keys
from safetensors.torch import load_file
from step_profiles import check_profile
from two_worker_runs import ENGINES, TwoWorkers, run_two_workers

from april_rl.run.checkpointing.manifest import read_manifest
from april_rl.start.command_line import main
from april_rl.start.commands import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
BUDGET, BUFFER, PENALTY = 96, 0.2 * 96, 0.5  # DAPO's penalty for overlong responses


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory) -> TwoWorkers:
    return run_two_workers(tmp_path_factory.mktemp("two_workers"))


@pytest.fixture(scope="module")
def first(two_workers) -> Path:
    return two_workers.dir_of("first")


@pytest.fixture(scope="module")
def together(two_workers) -> Path:
    return two_workers.dir_of("together")


@pytest.mark.parametrize(("name", "num_steps"), [("first", 5), ("together", 6)])
def test_two_workers_train_and_leave_no_shared_memory(two_workers, name, num_steps):
    """Every tick compares the ranks of an engine. Leftover names of shared memory would keep the
    next run from starting.
    """
    run_dir, done = two_workers.dir_of(name), two_workers.done[name]
    assert f"2 workers on cpu, {ENGINES[name]}" in done.stdout + done.stderr
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["runtime"]["num_workers"] == 2
    rows = steps_of(run_dir)
    assert len(rows) == num_steps
    assert (run_dir / "report.html").stat().st_size > 10_000
    weights = load_file(two_workers.folder / "model" / "model.safetensors")
    for row in rows:
        assert row["sync/bytes"] == sum(4 * tensor.numel() for tensor in weights.values())
        assert 0 < row["rollout/stop_s"] <= row["rollout/time_s"]
        assert row.get("mismatch/logprob_abs_mean", 0) <= 0.02
    assert sum("mismatch/logprob_abs_mean" in row for row in rows) > 1
    left = two_workers.shared_memory
    assert [name for name in left if "cpushm" in name or name.startswith("psm_")] == []


def test_parked_samples_continue_with_or_without_their_kv_cache(first, together):
    """Fails when `rollout.resume` has no effect, or the ranks of an engine keep
    different samples.
    """
    for run_dir, keeps in ((first, False), (together, True)):
        steps = steps_of(run_dir)
        assert sum(row["rollout/resumed_samples"] for row in steps) > 0
        assert (sum(row["rollout/kept_samples"] for row in steps) > 0) == keeps


def test_a_run_does_not_resume_with_a_changed_data_file(two_workers, first, tmp_path):
    lines = (two_workers.folder / "sums.jsonl").read_text().splitlines()
    changed = tmp_path / "changed.jsonl"
    checkpoint = f"resume={first / 'checkpoints' / 'step_5'}"
    for number, text in ((60, [*lines[:-1], lines[-1].replace("14", "15")]), (59, lines[:-1])):
        changed.write_text("\n".join(text))
        longer = "trainer.num_steps=6"  # a finished run is refused before its data is read
        message = refusal(two_workers.folder, tmp_path, checkpoint, longer, f"data.path={changed}")
        said = rf"^data\.path={changed} .*gives {number} prompts.*resume with the same data"
        assert re.search(said, message)


def test_a_run_writes_correct_metrics_and_exports(first):
    """Fails when a stage reports no metrics, or a policy is not exported when it is due."""
    rows = rows_of(first)
    steps = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    # Some appear only in steps where they have a meaning.
    returned = {key for row in rows for key in row}
    assert missing(returned) == []
    assert undescribed_keys(returned) == []
    check_ledger(steps)
    for row in steps:
        assert row["ledger/in_flight"] == 0
        ages = [row[key] for key in row if key.startswith("staleness/token_frac_age_")]
        assert sum(ages) == pytest.approx(1.0)
        assert sum(ages[1:]) == pytest.approx(row["staleness/off_policy_token_frac"])
    assert max(row["staleness/age_max"] for row in steps) >= 1, "nothing was resumed"
    assert {path.name for path in (first / "exports").iterdir()} == {"step_2", "step_4", "step_5"}
    assert list(first.glob("wandb/offline-run-*"))


def test_a_run_says_which_of_its_settings_the_device_ignores(two_workers):
    """As the user wrote them. Fails when they are checked only after `auto` was resolved."""
    assert "learner.offload=all has no effect on CPU" in two_workers.done["first"].stdout


def test_the_checkpoint_of_a_run_can_be_inspected(first, capsys):
    last, row = first / "checkpoints" / "step_5", rows_of(first)[-1]
    ledger = read_manifest(last).about["ledger"]
    assert checkpoint.main(["list", str(first)]) == 0
    assert f"{last}  " in capsys.readouterr().out.splitlines()[-2]
    assert checkpoint.main(["show", str(first)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"(?s)step 5 of 5.* runtime\.num_workers=2 .*=\S+/step_5 hydra\.run", shown)
    assert f"ledger     {row['ledger/opened']:.0f} opened" in shown
    for state in ("parked", "ready"):
        assert f"{state:11}{ledger[state]} groups with " in shown
    assert checkpoint.main(["verify", str(last)]) == 0
    assert "files match the manifest" in capsys.readouterr().out
    assert checkpoint.main(["prune", str(first), "keep_last=1"]) == 0
    assert [path.name for path in (first / "checkpoints").glob("step_*")] == ["step_5"]


def test_a_profiled_step_shows_phases_and_the_calls_of_the_first_worker_on_one_clock(first):
    """Fails when a worker's times do not match the controller's, or a process is missing."""
    (path,) = (first / "profile").glob("step_00002.trace.json.gz")
    check_profile(path, workers={"worker 0"})


def test_memory_and_kv_cache_are_measured(first):
    """Fails when a number is missing, has the wrong unit, or is larger than possible."""
    for row in steps_of(first):
        assert 0 < row["rollout/kv_cache_frac"] <= 1
        assert 0 < row["memory/host_used_frac"] < 1
        assert 2**28 < row["memory/controller_rss_bytes"] < 2**34
        assert 2**28 < row["memory/worker_rss_bytes"] < 2**34
        assert row["memory/buffer_bytes"] >= 12 * row["rollout/parked_tokens"]


def test_a_controller_never_loads_an_engine_or_touches_cuda(first):
    """During the whole run. Fails when any part of it imports vllm at any time."""
    loaded = (first.parent / "loaded").read_text()
    assert loaded == "torch True, vllm False, cuda False"


def test_dapo_rejects_groups_without_signal_and_penalises_overlong_responses(first):
    """Fails when rejected groups are trained, or advantages ignore the penalty."""
    assert sum(row["rollout/rejected_groups"] for row in steps_of(first)) > 0
    groups = groups_of(first)
    assert len(groups) == 4 * 5
    punished = 0
    for group in groups:
        rewards = np.array([sample["reward"] for sample in group])
        assert 0 < rewards.sum() < len(rewards)
        over = np.array([sample["num_tokens"] for sample in group]) - (BUDGET - BUFFER)
        shaped = rewards - PENALTY * np.clip(over / BUFFER, 0, 1)
        punished += int((shaped != rewards).any())
        expected = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
        found = [sample["advantage"] for sample in group]
        assert found == pytest.approx(expected.tolist(), abs=1e-3)
    assert punished > 0


def test_a_reference_and_two_minibatches_show_in_the_loss(first):
    """The first step starts at the reference, so only its second minibatch can differ from it."""
    steps = steps_of(first)
    assert all("loss/reference_kl" in row for row in steps)
    assert 0 < steps[0]["loss/reference_kl"] < steps[-1]["loss/reference_kl"]
    assert all(row["loss/ratio_max"] > 1 for row in steps)


def test_the_entropy_bonus_grows_while_the_entropy_is_below_its_target(first):
    """A target of ten nats is more than the vocabulary allows."""
    found = [row["loss/entropy_coefficient"] for row in steps_of(first)]
    assert found == pytest.approx([0.0, 0.005, 0.01, 0.015, 0.02])


def test_every_pass_over_a_batch_is_an_optimizer_step_of_the_schedule(first):
    """Five steps of two minibatches and two passes. The schedule is linear, and so are the means of
    a step's rates. Fails when the schedule or the learner ignores the second pass.
    """
    rates = [row["loss/lr"] for row in steps_of(first)]
    expected = [1e-3 * (1 - (4 * step + 1.5) / 20) for step in range(5)]
    assert rates == pytest.approx(expected)


def test_tokens_beyond_the_staleness_cap_are_masked(together):
    """The cap is one step. Fails when a step waits for scores that take three steps, or when such
    tokens are trained.
    """
    steps = steps_of(together)
    assert max(row["staleness/age_max"] for row in steps) >= 3
    for row in steps:
        is_over = row["staleness/age_max"] > 1
        assert is_over == (row["staleness/masked_tokens"] > 0) == (row["loss/age_weight_mean"] < 1)


def test_gspo_clips_whole_responses_within_its_narrow_bounds(together):
    """3e-4 below 1 and 4e-4 above. Fails when other bounds are used: nothing would be clipped."""
    steps = steps_of(together)
    assert np.mean([row["loss/clip_frac"] for row in steps]) > 0.01
    assert all(row["loss/ratio_max"] > 1 for row in steps)


def test_adapters_are_written_next_to_the_weights_they_are_merged_into(two_workers, together):
    """Fails when the whole model is trained, or the exported weights are not the sum of both."""
    start = load_file(two_workers.folder / "model" / "model.safetensors")
    check_merged(together / "exports" / "step_6", start, scaling=32.0 / 4)


def test_a_sweep_over_alpha_starts_from_an_export_on_a_mixture(
    two_workers, first, tmp_path, monkeypatch, capfd
):
    """One synchronous and one one-shot run, each in its own folder, and a refused run between them.
    Fails when vLLM or the learner cannot load what a run exports, sources do not get their shares,
    a failed run ends the sweep, or a run leaves something behind that stops the next one.
    """
    swept = command(
        two_workers.folder,
        tmp_path / "unused",
        "hydra.sweep.dir=sweep",
        "rollout.refill=false",
        "rollout.over_sampling_factor=1,0.5,2",
        "algorithm=dr_grpo",
        "trainer.num_steps=3",
        f"model.path={first / 'exports' / 'step_5'}",
        "data.path=???",
        f"+data.sources.sums={{path: {two_workers.folder / 'sums.jsonl'}, weight: 3}}",
        f"+data.sources.asked={{path: {two_workers.folder / 'sums.jsonl'}, instruction: '?'}}",
        "tracking.save_samples_every=1",
        "runtime.ray=false",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the program sets it
    monkeypatch.setattr(sys, "argv", [*swept[2:], "--multirun"])
    with pytest.raises(SystemExit, match="1"):
        main()
    printed = capfd.readouterr()
    assert "error: rollout.over_sampling_factor must be" in printed.err
    assert printed.err.endswith("sweep/1_run\n"), printed.err[-3000:]
    assert (tmp_path / "sweep" / "comparison.html").stat().st_size > 10_000
    assert "α = 2 one-shot" in printed.out
    folders = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [path.name for path in folders] == ["0_run", "2_run"]
    for run_dir, factor in zip(folders, (1, 2), strict=True):
        steps = steps_of(run_dir)
        assert [row["step"] for row in steps] == [1, 2, 3]
        assert [row["rollout/over_sampling_factor"] for row in steps] == [factor] * 3
        assert steps[0]["mismatch/logprob_abs_mean"] <= 0.02
        is_one_shot = factor == 2
        num_sums = sum(row.get("source/sums/groups", 0) for row in steps)
        assert num_sums + sum(row.get("source/asked/groups", 0) for row in steps) == 12
        # 12 of the 24 opened groups are drawn; the synchronous run trains all groups that it opens.
        assert 6 <= num_sums < 12 if is_one_shot else num_sums == 9
        left = sum(row["rollout/parked_groups"] + row["rollout/ready_groups"] for row in steps)
        assert (left > 0) == is_one_shot
        assert (max(row["staleness/age_max"] for row in steps) > 0) == is_one_shot
        for group in groups_of(run_dir):  # Dr. GRPO does not divide by the standard deviation
            rewards = np.array([sample["reward"] for sample in group])
            found = [sample["advantage"] for sample in group]
            assert found == pytest.approx((rewards - rewards.mean()).tolist())
