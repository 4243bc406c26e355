"""Training and evaluating from Python, as docs/python.md and its notebook show it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import environment, rows_of
from source_tree import ROOT

from april_rl.api import evaluate, train
from april_rl.errors import RunError


def ran(code: str, folder: Path, *, is_script: bool) -> str:
    """Run code in `folder`, as a script or as a notebook, which has no file; return its output."""
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *(["script.py"] if is_script else ["-c", code])],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_code_of_the_page_trains_and_evaluates(tmp_path: Path) -> None:
    """With a reward and data that are objects. Fails when the page is not true, or the reward is
    not the one that was given.
    """
    [code] = (ROOT / "docs" / "python.md").read_text().split("```python\n")[1:]
    printed = ran(code.partition("```")[0], tmp_path, is_script=True)
    [run_dir] = (tmp_path / "outputs" / "tiny_cpu").iterdir()
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "eval/sums/avg_at_k" in rows[-1]
    assert "reward/mean" in printed
    samples = (run_dir / "samples" / "step_00001.jsonl").read_text().splitlines()
    for sample in map(json.loads, samples):
        is_right = sample["response"].strip().endswith(f"\\boxed{{{sample['answer']}}}")
        assert sample["reward"] == float(is_right)
    [evaluation] = (tmp_path / "outputs" / "evaluate").iterdir()
    assert (evaluation / "evaluation.json").exists()


@pytest.mark.soak
@pytest.mark.cpu_engine
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its cells one after another; a kernel would add nothing but its own processes."""
    cells = json.loads((ROOT / "docs" / "python.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 5
    ran("\n\n".join(code), tmp_path, is_script=False)
    [run_dir] = (tmp_path / "outputs" / "tiny_cpu").iterdir()
    assert rows_of(run_dir)[-1]["step"] == 20


def test_a_wrong_setting_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"num_step is not a setting; did you mean trainer\.num_steps"
    ):
        train("tiny_cpu", "trainer.num_step=3", run_dir=tmp_path / "run")
    with pytest.raises(RunError, match="there is no recipe tiny_cp; did you mean tiny_cpu"):
        evaluate("tiny_cp", output=tmp_path / "evaluation")
    assert not list(tmp_path.iterdir())


def test_a_reward_that_cannot_be_given_to_a_process_is_named(tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file, pytest.raises(RunError, match="can be given"):
        train(
            "tiny_cpu",
            run_dir=tmp_path / "run",
            reward=lambda prompts, *_: [float(file.tell()) for _ in prompts],
        )


def test_a_call_outside_the_main_thread_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor() as threads:
        call = threads.submit(train, "tiny_cpu", run_dir=tmp_path / "run")
        with pytest.raises(RunError, match=r"called in the thread ThreadPool.*SIGTERM"):
            call.result()
        with pytest.raises(RunError, match="to the main thread alone"):
            threads.submit(evaluate, "tiny_cpu", output=tmp_path / "run").result()
    assert list(tmp_path.iterdir()) == []


def test_a_script_without_a_guard_gets_an_error_that_names_it(tmp_path: Path) -> None:
    """A process that starts anew imports it. Fails when that process trains, or the directory is
    said to belong to another run.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\nfrom april_rl.api import train\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    process.start()\n    process.join()\n    raise SystemExit(process.exitcode)\n"
        "train('tiny_cpu')\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "put the call under if __name__ == '__main__':" in done.stderr
    assert not (tmp_path / "outputs").exists()
