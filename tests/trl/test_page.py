"""The code of docs/trl.md: two lines under TRL, and the collector with the user's own generator."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from source_tree import ROOT


def test_the_collector_runs_with_a_generator_that_is_not_an_engine(capsys):
    """Fails when the interfaces change and the page does not."""
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[-1]
    names = {"__name__": "dice"}
    exec(compile(code, "docs/trl.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(step) for step in range(5) for _ in range(4)]
    assert any(re.search(r"\b0, 1\b", line) for line in lines), "a sample of two versions"


SMALL = """
import json, os
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
from datasets import Dataset
from april_rl.task.tiny.builtins import resolve
rows = [json.loads(line) for line in open(resolve("builtin:arithmetic")).readlines()[:32]]
given = {
    "model": resolve("builtin:tiny"),
    "reward_funcs": lambda completions, **_: [float(len(each) % 2) for each in completions],
    "train_dataset": Dataset.from_list(rows),
}
small = {
    "output_dir": "run", "use_cpu": True, "bf16": False, "max_steps": 3, "num_generations": 4,
    "max_completion_length": 48, "per_device_train_batch_size": 16, "logging_steps": 1,
    "report_to": "none", "vllm_max_model_length": 256,
}
"""


@pytest.mark.soak
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_the_two_lines_train_as_they_are_printed(tmp_path) -> None:
    """With a small model, rows, a reward and sizes in place of the reader's."""
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    code, num_given = re.subn(
        r"(model|reward_funcs|train_dataset)=[^\n]+,\n", r"\1=given['\1'],\n", code
    )
    code, num_small = re.subn(r"GRPOConfig\(\n", "GRPOConfig(**small,\n", code)
    assert (num_given, num_small) == (3, 1)
    (tmp_path / "two_lines.py").write_text(SMALL + code)
    done = subprocess.run(
        [sys.executable, "two_lines.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"'april/occupancy': ", done.stdout)) == 3, done.stdout[-3000:]
