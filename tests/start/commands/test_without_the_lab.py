"""A run and an evaluation end normally where the lab is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import command, environment, rows_of, run, write_task

HIDDEN = """import sys
from importlib.abc import MetaPathFinder

class WithoutTheLab(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "april_rl.lab" or name.startswith("april_rl.lab."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutTheLab())
"""


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in which neither its process nor one that it starts can import the lab."""
    (folder / "hidden").mkdir(exist_ok=True)
    (folder / "hidden" / "sitecustomize.py").write_text(HIDDEN)
    path = f"{folder / 'hidden'}:{environment()['PYTHONPATH']}"
    return run([sys.executable, *words], folder, PYTHONPATH=path)


def test_a_command_of_the_lab_names_the_missing_package(tmp_path):
    done = ran(tmp_path, "-m", "april_rl", "report", "run")
    message = "error: report needs april_rl/lab, which this installation lacks\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
    assert ran(tmp_path, "-m", "april_rl").returncode == 0


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_run_and_an_evaluation_end_normally_without_the_lab(tmp_path):
    """Fails when the core needs the lab anywhere, or a traceback appears in place of the report."""
    task = write_task(tmp_path)
    few = ("trainer.num_steps=2", "evaluation.max_prompts=4")
    done = ran(tmp_path, *command(task, tmp_path / "run", *few)[1:])
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2]
    assert "report: not written (error: report needs april_rl/lab" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    done = ran(
        *(tmp_path, "-m", "april_rl", "evaluate", f"model.path={tmp_path}/run/exports/step_2"),
        *(f"+evaluation.sets.sums={{path: {task}/sums.jsonl}}", "data.template=plain"),
        *("evaluation.max_prompts=4", "rollout.max_response_tokens=16", "runtime.device=cpu"),
        *("data.max_prompt_tokens=16", "engine.kv_cache_gib=0.25", "output=evaluation"),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "evaluation" / "evaluation.json").is_file()
