"""A GPU's calibration.json changes predictions, and a file with impossible values is refused."""

import json
import re
from pathlib import Path

import pytest
from composed_config import load
from planned_models import sizes_of

from april_rl.__main__ import main
from april_rl.lab.rehearsal.assumptions import Assumptions
from april_rl.lab.rehearsal.real_size import gains_table, memory_at_real_size, scenario_at_real_size
from april_rl.start.planning.memory_inputs import Beside

# A GPU that reads and computes twice as fast as the H100 of the presets.
MEASURED = {
    "device": "a fast GPU",
    "decode_bytes_per_s": 2 * 0.75 * 3.35e12,
    "between_steps_s": 1e-3,
    "prefill_flops_per_s": 989e12,
    "update_flops_per_s": 200e12,
    "sync_bytes_per_s": 1e10,
    "asleep_gib": 3.0,
}
RECIPE = "+recipe=qwen3_4b_dapo"


def written(folder: Path, **changes: object) -> Path:
    path = folder / "calibration.json"
    path.write_text(json.dumps(MEASURED | changes))
    return path


@pytest.mark.slow
def test_a_calibration_changes_what_a_rehearsal_predicts(tmp_path):
    config, model = load(RECIPE), sizes_of("4B")
    assumed, overrides = Assumptions.of([RECIPE, f"calibration={written(tmp_path)}"])
    assert overrides == [RECIPE]
    before, after = (
        scenario_at_real_size(config, model, each, beside=Beside()).cost
        for each in (Assumptions(), assumed)
    )
    assert after.step_s == pytest.approx(before.step_s / 2)
    assert after.context_token_s == pytest.approx(before.context_token_s / 2)
    assert after.prefill_token_s == pytest.approx(before.prefill_token_s / 2)
    plans = [
        memory_at_real_size(config, model, each, beside=Beside()).table
        for each in (Assumptions(), assumed)
    ]
    kept = [row for plan in plans for row in plan.splitlines() if "sleeping engine" in row]
    assert ["1.4" in kept[0], "3.0" in kept[1]] == [True, True]
    # 32 × 8 × (10,240 + 256) tokens, 8 FLOPs for each of 4.02 billion parameters, on eight GPUs.
    assert "update 54.0 s, weight sync 0.8 s" in gains_table(
        config, model, assumed, beside=Beside()
    )


def test_a_calibration_changes_a_simulated_preset(tmp_path, capsys):
    command = ["--preset", "h100_qwen3_4b", "--steps", "1", "--warmup-steps", "0", "--alpha", "1.5"]
    found = []
    for more in ([], ["--calibration", str(written(tmp_path))]):
        assert main(["simulate", *command, *more, "--json", str(tmp_path / "found.json")]) == 0
        found.append(json.loads((tmp_path / "found.json").read_text())[0]["rollout_s"])
    assert found[1] == pytest.approx(found[0] / 2, rel=0.05)
    assert "a fast GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decode_bytes_per_s": 2500},
            "decode_bytes_per_s in .* from 1e\\+08 to 1e\\+14, got 2500",
        ),
        ({"asleep_gib": None}, "asleep_gib in .* got None"),
        ({"between_steps_s": float("nan")}, "between_steps_s in .* got nan"),
        ({"mfu": 0.2}, "must be an object with device, decode_bytes_per_s"),
    ],
)
def test_a_bad_calibration_is_refused_with_its_key(tmp_path, capsys, changes, message):
    path = written(tmp_path, **changes)
    assert main(["rehearse", RECIPE, f"calibration={path}"]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_calibration_is_refused(tmp_path, capsys):
    assert main(["rehearse", RECIPE, f"calibration={tmp_path / 'none.json'}"]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err
