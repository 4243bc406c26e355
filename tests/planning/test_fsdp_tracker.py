"""The memory plan against torch's own tracker of FSDP2, with fake tensors at real sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from planned_models import CONFIGS, INPUTS, change
from source_tree import ROOT

from april_rl.config.lora import LoraConfig
from april_rl.learner.model.model_sizes import model_sizes
from april_rl.planning.memory_plan import plan_memory
from april_rl.planning.model import read_model

NUM_TOKENS = 4096
TABLE = (ROOT / "docs" / "long_context.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| Qwen3-(\S+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", TABLE, flags=re.MULTILINE
)


def measure(folder: Path, *, num_ranks: int) -> dict[str, float]:
    program = Path(__file__).with_name("fake_training.py")
    command = [sys.executable, program, folder, str(num_ranks), str(NUM_TOKENS), "True"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_backward_pass_takes_what_the_page_says_of_the_plan(row, tmp_path):
    """A second backward pass, when there are moments and gradients of another row; half a minute
    each. Fails when a copy of weights or gradients is left out of the plan, or counted twice.
    """
    name, *cells = row
    CONFIGS[name].save_pretrained(tmp_path)
    model = model_sizes(read_model(str(tmp_path)), LoraConfig())
    for num_ranks, cell in zip((1, 8, 64), cells, strict=True):
        inputs = change(INPUTS, num_workers=num_ranks, max_tokens=NUM_TOKENS)
        _, backward, optimizer, _ = plan_memory(model, inputs).phases
        found = measure(tmp_path, num_ranks=num_ranks)
        assert found["state"] == pytest.approx(optimizer.total, rel=1e-5)
        assert found["backward"] / backward.total == pytest.approx(float(cell), abs=0.006)


def test_the_page_has_three_models() -> None:
    assert [name for name, *_ in ROWS] == list(CONFIGS)
