"""The functions on docs/python.md, trained by the command on that page."""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import refusal, rows_of, run, run_here
from source_tree import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
_, MODULE, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
[WORDS] = re.findall(r"^python -m april_rl\.train (.*algorithm\.loss.*)$", PAGE, flags=re.MULTILINE)
SMALL = (
    *("trainer.num_steps=2", "trainer.num_groups=4", "rollout.group_size=4"),
    "evaluation.sets.held_out=null",
)


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_command_of_the_page_trains_with_the_functions_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a function is not used, or its metric is not logged."""
    learning = "        with open('learned', 'a') as file:\n"
    learning += "            file.write(f'{index} {len(rewards)}\\n')\n"
    code = MODULE.replace("        if not any(rewards):", f"{learning}        if not any(rewards):")
    filtering = "    with open('filtered', 'a') as file:\n        file.write('a group\\n')\n"
    code = code.replace("    return 0.0 <", f"{filtering}    return 0.0 <")
    (tmp_path / "my_algorithm.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    own = (
        "algorithm.advantage=my_algorithm:signs",
        "algorithm.group_filter=my_algorithm:is_mixed",
        "data.sampler=my_algorithm:InOrder",
        "algorithm.args={high: 1.000001, scale: 0.5}",
    )
    words = [word.strip("'") for word in WORDS.split() if not word.startswith("'algorithm.args")]
    words.remove("3}")
    run_here(None, tmp_path / "run", *words, *own, *SMALL)
    row = rows_of(tmp_path / "run")[-1]
    assert row["loss/own/log_ratio_abs"] > 0
    assert 0 < row["loss/clip_frac"] < 1
    lines = (tmp_path / "run" / "samples" / "step_00002.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert {sample["advantage"] for sample in samples} == {0.5, -0.5}
    by_prompt: dict[int, set[float]] = {}
    for sample in samples:
        by_prompt.setdefault(sample["prompt_id"], set()).add(sample["reward"])
    assert all(len(rewards) == 2 for rewards in by_prompt.values())
    lines = {int(sample["source"].rpartition(":")[2]) for sample in samples}
    assert max(lines) < 60, "prompts at the beginning of the file"
    assert len((tmp_path / "filtered").read_text().splitlines()) >= 8, "each group of two steps"
    trial, *learned = [line.split() for line in (tmp_path / "learned").read_text().splitlines()]
    assert trial == ["0", "2"], "two invented rewards, before training"
    assert len(learned) >= 8
    assert {size for _, size in learned} == {"4"}


@pytest.mark.soak
@pytest.mark.cpu_engine
def test_the_script_of_the_page_trains_with_a_function_as_an_object(tmp_path: Path) -> None:
    (tmp_path / "my_algorithm.py").write_text(MODULE)
    script = SCRIPT.replace(
        'trainer={"num', 'evaluation={"max_prompts": 8}, trainer={"num_steps": 1, "num'
    )
    (tmp_path / "script.py").write_text(script)
    done = run([sys.executable, "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    [run_dir] = (tmp_path / "outputs" / "tiny_cpu").iterdir()
    assert "loss/own/log_ratio_abs" in rows_of(run_dir)[-1]


def test_a_loss_with_a_wrong_shape_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = MODULE.replace("return TokenLoss(loss,", "return TokenLoss(loss.mean(),")
    (tmp_path / "my_reduced_loss.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(None, tmp_path, "+recipe=tiny_cpu", "algorithm.loss=my_reduced_loss:bounded")
    assert "algorithm.loss=my_reduced_loss:bounded" in message
    assert "it needs one value for each token" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "name", "code", "sentence"),
    [
        (
            "algorithm.advantage",
            "flat",
            "def flat(samples, rewards):\n    return rewards[0]",
            "group a",
        ),
        ("algorithm.group_filter", "none", "def none(scored):\n    pass", "it returned None"),
    ],
)
def test_a_function_that_returns_something_else_is_refused_before_an_engine_starts(
    key: str, name: str, code: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the run calls it only with its first groups."""
    (tmp_path / f"my_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delattr("april_rl.start.assembly.run.build_workers")
    message = refusal(None, tmp_path, "+recipe=tiny_cpu", f"{key}=my_{name}:{name}")
    assert f"{key}=my_{name}:{name}: " in message
    assert sentence in message
