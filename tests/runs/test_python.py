"""Training and evaluating from Python, as docs/python.md and its notebook show."""

import json
import runpy
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
from command_line import rows_of, run
from source_tree import ROOT

from april_rl.api import TrainedRun, evaluate, train
from april_rl.config.store import recipes
from april_rl.errors import RunError
from april_rl.start.commands import checkpoint

ONE_PROCESS = {"ray": False, "threads": 1}


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_code_of_the_page_trains_and_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script in this process, with a reward and data given as objects, but smaller and without
    Ray. Fails when the page is wrong, or another reward is used.
    """
    code = (ROOT / "docs" / "python.md").read_text().split("```python\n")[1]
    code = code.partition("```")[0]
    for shown, small in (
        ('"evaluation.sets.held_out=null",', '"evaluation.sets.held_out=null", *SMALL,'),
        ('"num_steps": 3, "num_groups": 8', '"num_steps": 1, "num_groups": 4'),
        ('"evaluation.max_prompts=32"', '"evaluation.max_prompts=4", *SMALL[:2]'),
    ):
        assert shown in code
        code = code.replace(shown, small)
    small = ("runtime.ray=false", "runtime.threads=1", "rollout.group_size=4")
    (tmp_path / "script.py").write_text(f"SMALL = {small}\n{code}")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    printed = capsys.readouterr().out
    [run_dir] = (tmp_path / "outputs" / "tiny_cpu").iterdir()
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1]
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
    """Its cells run one after another; a kernel would only add its own processes."""
    cells = json.loads((ROOT / "docs" / "python.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 5
    done = run([sys.executable, "-c", "\n\n".join(code)], tmp_path, timeout_s=600)
    assert done.returncode == 0, done.stderr
    [run_dir] = (tmp_path / "outputs" / "tiny_cpu").iterdir()
    assert rows_of(run_dir)[-1]["step"] == 20


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_process_lives_on_after_a_stop_and_the_run_continues(tmp_path: Path) -> None:
    """As a notebook's kernel, for longer than a command would have to end, with an environment and
    a loss of its own. Fails when the deadline of the first run ends the process, the second one
    begins again, or uses what the first one was given.
    """
    (tmp_path / "script.py").write_text(STOPPED)
    done = run([sys.executable, "script.py"], tmp_path, timeout_s=900)
    assert done.returncode == 0, done.stderr
    assert "stopped after step 1 by SIGINT" in done.stdout
    assert done.stdout.splitlines()[-1] == "alive, and the own process too; steps [0, 1, 2]"
    assert {row.get("loss/own/second") for row in rows_of(tmp_path / "run")} == {None, 2.0}
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "function: given_environment_function_Own:Own" in config


STOPPED = """
import os, signal, subprocess, time
import torch
from april_rl.training.algorithm.losses import TokenLoss
from april_rl.api import train
from april_rl.task.environments.tiny_sums import Sums

class Own(Sums):
    pass

def stop(step, row):
    if step == 1:
        os.kill(os.getpid(), signal.SIGINT)

def run(*overrides, **settings):
    small = {"trainer": {"num_steps": 2, "num_groups": 4}, "rollout": {"group_size": 4}}
    one_process = {"ray": False, "threads": 1}
    return train(
        "tiny_tools_cpu", *overrides, runtime=one_process, run_dir="run", environment=Own,
        evaluation={"sets": {"held_out": None}}, **small, **settings,
    )

if __name__ == "__main__":
    own = subprocess.Popen(["sleep", "600"])
    def loss(inputs):
        return TokenLoss(-inputs.logprobs * inputs.advantages, inputs.logprobs > 0)

    try:
        run(on_step=stop, functions={"algorithm.loss": loss})
    except KeyboardInterrupt:
        time.sleep(9)

    def loss(inputs):
        second = torch.full_like(inputs.logprobs, 2.0)
        plain = -inputs.logprobs * inputs.advantages
        return TokenLoss(plain, inputs.logprobs > 0, {"second": second})

    found = run("resume=auto", algorithm={"loss": loss}).metrics
    assert own.poll() is None
    own.kill()
    print(f"alive, and the own process too; steps {list(found.index)}")
"""


class Trained(NamedTuple):
    """A run with rows, settings, a tool and `on_step`, all objects of Python."""

    folder: Path
    run: TrainedRun
    seen: dict[int, dict[str, float]]  # rows of metrics by step, as `on_step` got them
    calls: Path  # a line for each call of the tool


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    recipe = folder / "conf" / "recipe" / "mine_python.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("defaults: [tiny_cpu]\nname: mine_python\n")
    digits = range(1, 10)
    rows = [
        {"prompt": f"a3+b{b}+c{c}+d5=", "answer": str(b + c + 8)} for b in digits for c in digits
    ]
    seen: dict[int, dict[str, float]] = {}
    calls = folder / "calls"

    def on_step(step: int, row: Mapping[str, float]) -> bool:
        seen[step] = dict(row)
        return step == 2

    def boxed(value: str) -> str:
        """Receive a sum.

        Args:
            value: The sum.
        """
        with calls.open("a") as file:
            file.write(f"{value}\n")
        return "0"

    ended = train(
        "mine_python",
        {"runtime": ONE_PROCESS, "evaluation.sets.held_out": None, "data": {"template": "chat"}},
        run_dir=folder / "run",
        config_dir=folder / "conf",
        data=rows,
        held_out={"own": rows[:4]},
        checkpoint={"best_metric": "eval/own/avg_at_k"},
        reward="exact",
        tools=[boxed],
        on_step=on_step,
        environment={"max_turns": 2, "max_observation_tokens": 16},
        trainer={"num_steps": 9, "num_groups": 4},
        rollout={"group_size": 4},
    )
    recipes().pop("mine_python")  # so that other tests do not see it
    return Trained(folder, ended, seen, calls)


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_rows_and_settings_of_python_train_until_on_step_returns_true(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when another step is trained, the run ends without evaluation or export, or its
    checkpoint does not say how to resume it.
    """
    folder, run, seen, _ = trained
    logged = {int(row.pop("step")): row for row in rows_of(run.path)}
    assert list(logged) == list(seen) == [0, 1, 2]
    assert seen[1] == logged[1]
    assert "eval/own/avg_at_k" in logged[2]
    assert run.export is not None
    assert run.export.name == "step_2"
    assert checkpoint.main(["show", str(run.path)]) == 0
    resume = next(line for line in capsys.readouterr().out.splitlines() if "resume" in line)
    assert f"--config-dir {folder / 'conf'} +recipe=mine_python" in resume
    assert f"data.path={folder / 'run' / 'inputs' / 'data.jsonl'}" in resume


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_functions_are_tools_that_the_policy_calls(trained: Trained) -> None:
    assert len(trained.calls.read_text().splitlines()) >= 2 * 4 * 4
    lines = (trained.run.path / "samples" / "step_00001.jsonl").read_text().splitlines()
    conversations = [json.loads(line)["conversation"] for line in lines]
    assert ["environment", " 0 "] in [said[1] for said in conversations]


def test_tools_without_a_reward_are_refused_where_a_reward_is_needed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="functions, which give no reward"):
        train("tiny_tools_cpu", run_dir=tmp_path / "run", tools=[print_sum])


def print_sum(value: str) -> str:
    """Receive a sum.

    Args:
        value: The sum.
    """
    return value


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"data": [1, 2]}, r"data has rows that cannot be written \(a row is a dict, got 1\)"),
        ({"data": []}, "data has no rows: the list is empty"),
        ({"functions": [len]}, "functions is a dict of functions by setting"),
        ({"data": [{"prompt": {1, 2}}]}, "set is not JSON"),
        ({"data": {"prompt": ["1"]}}, r"a dict as data holds settings .* rows are a list of dicts"),
        ({"data": {"template": "odd"}}, "data.template must be chat, plain or a text with {pr"),
        ({"reward": {"functoin": "exact"}}, r"dict as reward holds settings .* reward=FUNCTION"),
        ({"reward_funcs": [len]}, r"functions are given .* TRL's reward_funcs is"),
        ({"train_dataset": [{"prompt": "1"}]}, r"rows .* TRL's train_dataset is here"),
        ({"resume": "absent"}, "resume=absent is neither a checkpoint"),
        ({"held_out": [{"prompt": "1"}]}, r"held_out is a dict of rows by .* \{'test': rows\}"),
        ({"tools": ["add"]}, "tools is a list of functions"),
        ({"tools": len}, "tools is a list of functions"),
        ({"on_step": 5}, r"on_step is called as on_step\(step, row\), .*; 5 cannot be"),
        ({"on_step": lambda step: step}, r"cannot be: too many positional arguments"),
        ({"environment": 5}, "environment is a int; give a function or a class, or a dict"),
        ({"environment": dict, "tools": [len]}, "tools and environment: give one of them"),
        ({"reward": ["exact"]}, "several rewards are reward.functions"),
        ({"trainer": 3}, "trainer"),
        ({"trainr": {"num_steps": 3}}, "did you mean trainer"),
        ({"trainer": {"num_step": 3}}, r"did you mean trainer\.num_steps"),
    ],
)
def test_a_wrong_argument_gives_an_error_of_one_sentence(
    arguments: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=sentence) as caught:
        train("tiny_cpu", run_dir=tmp_path / "run", **arguments)
    assert "\n" not in str(caught.value)


def test_data_sets_are_written_without_a_progress_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(RunError, match="tools is a list of functions"):
        train("tiny_cpu", run_dir=tmp_path, data=rows, tools=["add"])  # type: ignore[list-item]
    assert (tmp_path / "inputs" / "data.parquet").is_file()
    assert "Creating parquet" not in capfd.readouterr().err


def test_a_notebook_is_not_told_to_install_table_packages() -> None:
    """Ray believes that it runs in a notebook. Fails when its line about ipywidgets is printed."""
    code = (
        "import sys, types\n"
        "class ZMQInteractiveShell:\n"
        "    events = types.SimpleNamespace(register=lambda *_: None)\n"
        "sys.modules['IPython'] = types.ModuleType('IPython')\n"
        "sys.modules['IPython'].get_ipython = ZMQInteractiveShell\n"
        "import april_rl.training.runtime.cluster\n"
    )
    done = run([sys.executable, "-c", code], ROOT)
    assert done.returncode == 0, done.stderr
    assert "ipywidgets" not in done.stdout + done.stderr


@pytest.mark.parametrize("recipe", [{"trainer": {"num_steps": 3}}, "+recipe=tiny_cpu"])
def test_settings_in_the_position_of_the_recipe_are_refused(recipe: Any) -> None:
    with pytest.raises(RunError, match="the first argument is the name of a recipe"):
        train(recipe)


def test_rows_that_are_not_held_out_are_refused_by_evaluate() -> None:
    with pytest.raises(RunError, match="evaluate takes rows as held_out"):
        evaluate("tiny_cpu", data=[{"prompt": "1", "answer": "1"}])


def test_a_run_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(
        RunError, match=r"run directory .*/run cannot be made here \(File exists\): give a folder"
    ):
        train("tiny_cpu", run_dir=tmp_path / "run")


def test_a_wrong_setting_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"num_step is not a setting; did you mean trainer\.num_steps"
    ):
        train("tiny_cpu", "trainer.num_step=3", run_dir=tmp_path / "run")
    with pytest.raises(RunError, match="there is no recipe tiny_cp; did you mean tiny_cpu"):
        evaluate("tiny_cp", output=tmp_path / "evaluation")
    assert not list(tmp_path.iterdir())


def test_a_reward_that_cannot_be_sent_to_a_process_is_named(tmp_path: Path) -> None:
    with (
        (tmp_path / "open.txt").open("w") as file,
        pytest.raises(RunError, match="be copied into another process"),
    ):
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
        with pytest.raises(RunError, match="to the main thread only"):
            threads.submit(evaluate, "tiny_cpu", output=tmp_path / "run").result()
    assert list(tmp_path.iterdir()) == []


def test_a_script_without_a_guard_gets_an_error_that_names_it(tmp_path: Path) -> None:
    """A new process imports the script. Fails when that process trains, or the error says that the
    directory belongs to another run.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\nfrom april_rl.api import train\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    process.start()\n    process.join()\n    raise SystemExit(process.exitcode)\n"
        "train('tiny_cpu')\n"
    )
    done = run([sys.executable, str(script)], tmp_path)
    assert done.returncode == 1
    assert "put the call under if __name__ == '__main__':" in done.stderr
    assert not (tmp_path / "outputs").exists()
