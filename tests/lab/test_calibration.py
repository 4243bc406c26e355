"""A GPU's calibration.json changes predictions, and a file with impossible values is refused."""

import json
import re
from pathlib import Path

import pytest
from composed_config import load
from planned_models import sizes_of
from shapes import shape_by_name

from april_rl.__main__ import main
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.price.memory import real_memory
from april_rl.lab.price.prediction import step_prices, work_of
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.lab.simulator.prediction import SYNCHRONOUS
from april_rl.start.planning.facts import Models
from april_rl.start.planning.memory_inputs import Beside

# A GPU that reads and computes twice as fast as is expected of an H100.
MEASURED = {
    "device": "a fast GPU",
    "decode_bytes_per_s": 2 * 0.80 * 3.35e12,
    "between_steps_s": 0.5e-3,
    "prefill_flops_per_s": 989.5e12,
    "update_flops_per_s": 2 * 0.30 * 989.5e12,
    "sync_bytes_per_s": 1e10,
    "asleep_gib": 3.0,
}
RECIPE = "+recipe=qwen3_4b_dapo"


def written(folder: Path, **changes: object) -> Path:
    path = folder / "calibration.json"
    path.write_text(json.dumps(MEASURED | changes))
    return path


def test_a_calibration_changes_what_is_predicted(tmp_path):
    config, models = load(RECIPE), Models(policy=sizes_of("4B"), beside=Beside())
    assumed, overrides = Assumptions.of([RECIPE, f"calibration={written(tmp_path)}"])
    assert overrides == [RECIPE]
    kind, measured = GPU_KINDS["h100"], assumed.calibration
    assert measured is not None
    work = work_of(config, assumed, shape=shape_by_name("4B"))
    memories = [real_memory(config, models, gpu_gib=80, measured=m) for m in (None, measured)]
    before, after = (
        step_prices(memories[0], work, rates=rates, modes=[SYNCHRONOUS])[0]
        for rates in (kind.rates(), measured.rates(kind))
    )
    assert after.rollout_s == pytest.approx(before.rollout_s / 2, rel=0.03)
    assert after.update_s == pytest.approx(before.update_s / 2)
    kept = [row for m in memories for row in m.table.splitlines() if "sleeping engine" in row]
    assert ["1.4" in kept[0], "3.0" in kept[1]] == [True, True]


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
    assert main(["rehearse", RECIPE, f"calibration={tmp_path / 'none.json'}"]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err
