"""The reward curve: what is drawn, from which files, and what is refused."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from april_rl.tracking.curve import mean_series, reward_curve

TOOL = Path(__file__).parent.parent / "tools" / "plot.py"


def write_run(folder: Path, *, seed: int, gain: float = 0.006, has_evaluation: bool = True) -> Path:
    folder.mkdir(parents=True)
    noise = random.Random(seed)
    path = folder / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(101):
            reward = min(1.0, 0.15 + gain * step + noise.uniform(-0.06, 0.06))
            row: dict[str, float | None] = {"step": step}
            if step:
                row["reward/mean"] = None if step == 50 else reward
            if has_evaluation and step % 10 == 0:
                row["eval/held_out/avg_at_k"] = min(1.0, 0.12 + gain * step)
            file.write(json.dumps(row) + "\n")
    return path


def num_columns_with_ink(path: Path) -> int:
    """Picture columns in which the first set-up's blue is seen."""
    picture = imread(path)[:, :, :3]
    blue = np.abs(picture - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.1
    return int(blue.any(axis=0).sum())


def test_the_mean_over_seeds_covers_the_steps_that_all_runs_have() -> None:
    assert mean_series([{1: 0.0, 2: 1.0, 3: 5.0}, {2: 0.0, 1: 1.0}]) == {1: 0.5, 2: 0.5}
    assert mean_series([]) == {}


def test_the_picture_shows_accuracy_and_reward_side_by_side(tmp_path: Path) -> None:
    seeds = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    alone = [write_run(tmp_path / "alone", seed=9, has_evaluation=False)]
    reward_curve({"factor 1.5": seeds, "factor 1": alone}, tmp_path / "new" / "both.png")
    reward_curve({"factor 1": alone}, tmp_path / "one.png")
    for name in ("new/both.png", "one.png"):
        height, width, _ = imread(tmp_path / name).shape
        assert (width, height) == (1440, 540)
        assert num_columns_with_ink(tmp_path / name) > 1000


def test_rewards_of_zero_are_rewards(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 0.0}\n{"step": 2, "reward/mean": 0.0}\n')
    reward_curve({"trial": [path]}, tmp_path / "curve.png")
    assert num_columns_with_ink(tmp_path / "curve.png") > 100


def test_a_file_without_reward_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss/total": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds neither reward/mean"):
        reward_curve({"trial": [path]}, tmp_path / "curve.png")


def test_the_command_draws_run_directories_and_refuses_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path / "trial" / "a", seed=1)
    out = tmp_path / "curve.png"
    command = [sys.executable, str(TOOL), "--out", str(out)]
    ran = subprocess.run([*command, str(tmp_path / "trial" / "a")], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"{out}\n"), ran.stderr
    assert out.is_file()
    ran = subprocess.run([*command, f"x={tmp_path / 'none'}"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"plot: {tmp_path / 'none'} does not exist")
    assert ran.stderr.count("\n") == 1
