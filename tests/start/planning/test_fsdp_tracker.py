"""The memory plan compared with torch's own FSDP2 memory tracker, with fake tensors at
real sizes.
"""

import json
import sys
from pathlib import Path

import pytest
from command_line import run
from planned_models import CONFIGS, INPUTS, change
from source_tree import ROOT

from april_rl.config.lora import LoraConfig
from april_rl.start.planning.memory_plan import Phase, plan_memory
from april_rl.start.planning.model import read_model
from april_rl.training.learner.model.model_sizes import model_sizes

NUM_TOKENS = 4096
# Measured ÷ planned peak of a backward pass, for weights sharded over each number of GPUs.
NUM_RANKS = (1, 8, 64)
PEAKS = {"4B": (0.99, 0.98, 0.94), "8B": (1.01, 0.98, 0.94), "30B-A3B": (1.00, 1.00, 0.99)}


def measure(folder: Path, *, num_ranks: int, share: float = 1.0) -> dict[str, float]:
    program = Path(__file__).with_name("fake_training.py")
    numbers = [str(number) for number in (num_ranks, NUM_TOKENS, share)]
    done = run([sys.executable, str(program), str(folder), *numbers], folder, timeout_s=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", PEAKS)
def test_the_backward_pass_takes_nearly_the_planned_memory(name, tmp_path):
    """In a second backward pass, when there are optimizer state and gradients of another row; half
    a minute each. Fails when a copy of weights or gradients is missing in the plan, or counted
    twice.
    """
    CONFIGS[name].save_pretrained(tmp_path)
    model = model_sizes(read_model(str(tmp_path)), LoraConfig())
    for num_ranks, share in zip(NUM_RANKS, PEAKS[name], strict=True):
        inputs = change(INPUTS, num_workers=num_ranks, max_tokens=NUM_TOKENS)
        _, backward, optimizer, _ = plan_memory(model, inputs).phases
        found = measure(tmp_path, num_ranks=num_ranks)
        assert found["state"] == pytest.approx(of_tensors(optimizer), rel=1e-5)
        assert found["backward"] / of_tensors(backward) == pytest.approx(share, abs=0.006)


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_the_backward_pass_takes_the_planned_memory_with_any_share_of_recomputed_layers(
    share, tmp_path
):
    """Qwen3-4B on eight GPUs. Fails when the plan is too low, or more than 4 % too high."""
    CONFIGS["4B"].save_pretrained(tmp_path)
    model = model_sizes(read_model(str(tmp_path)), LoraConfig())
    inputs = change(INPUTS, num_workers=8, max_tokens=NUM_TOKENS, activation_checkpointing=share)
    backward = plan_memory(model, inputs).phases[1]
    found = measure(tmp_path, num_ranks=8, share=share)
    assert 0.96 < found["backward"] / of_tensors(backward) <= 1.0


def of_tensors(phase: Phase) -> float:
    """Return the bytes of a phase without the memory for NCCL and CUDA graphs."""
    others = ("NCCL of the learner", "kept by a sleeping engine")
    return phase.total - sum(phase.items[name] for name in others)


def test_the_page_has_the_range_of_these_peaks() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    shares = [share for peaks in PEAKS.values() for share in peaks]
    assert list(PEAKS) == list(CONFIGS)
    assert f"measured {min(shares):.2f} to {max(shares):.2f} of the planned peak" in page
