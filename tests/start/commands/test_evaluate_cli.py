"""`python -m april_rl evaluate`: what it refuses and writes, and how two evaluations differ."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import write_task

from april_rl.__main__ import main
from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set
from april_rl.config.task import PromptSetConfig
from april_rl.errors import RunError
from april_rl.task.evaluation.estimators import passes
from april_rl.task.evaluation.held_out import EvaluationError
from april_rl.task.evaluation.intervals import Estimate, estimate, paired_difference
from april_rl.task.evaluation.report import (
    PromptValues,
    Report,
    SetReport,
    difference,
    read_report,
    write_report,
)
from april_rl.task.evaluation.settings import SetSampling

TINY = "+recipe=tiny_cpu"


def set_report(averages: list[float], *, k: int = 4, folder: str = "/data") -> SetReport:
    """Return a report with rows of {folder}/aime.jsonl, one for each average."""
    prompts = tuple(
        PromptValues(
            source=f"{folder}/aime.jsonl:{row}",
            answer=str(row),
            values={"avg_at_k": average, "pass_at_k": float(average > 0)},
        )
        for row, average in enumerate(averages)
    )
    found = {"avg_at_k": estimate(averages), "pass_at_k": estimate(np.array(averages) > 0)}
    return SetReport(
        path=f"{folder}/aime.jsonl",
        sampling=SetSampling(
            num_samples=k, temperature=0.6, top_p=0.95, max_response_tokens=100, max_prompts=None
        ),
        num_prompts=len(averages),
        estimates=found,
        response_tokens_mean=50.0,
        truncated_frac=0.1,
        errors=0,
        left_out_prompts=0,
        prompts=prompts,
    )


HERE = str(Path(__file__).parent)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=x"], "evaluation.sets is empty: choose a recipe"),
        ([TINY, "evaluation.sets.held_out=null"], "evaluation.sets is empty: choose a recipe"),
        ([TINY, "optimizer.lr=1"], "optimizer.lr has no effect on an evaluation"),
        ([TINY, "algorithm=dapo"], "algorithm has no effect on an evaluation"),
        ([TINY, "rollout.group_size=4"], "rollout.group_size has no effect on an evaluation"),
        ([TINY, "data.path=x"], "evaluation; write '+evaluation.sets.NAME={path: FILE}'"),
        ([TINY, "evaluation.every=3"], "evaluation.every has no effect on an evaluation"),
        ([TINY, "hydra.run.dir=x"], "hydra.run.dir has no effect here; give output=FOLDER"),
        ([TINY, "+evaluation.sampls=3"], "did you mean evaluation.num_samples"),
        ([TINY, "evaluation.top_p=2"], "evaluation.top_p must be in (0, 1], got 2"),
        ([TINY, "environment.max_turns=0"], "environment.max_turns must be >= 1, got 0"),
        ([TINY, "--compare", "/nowhere"], "/nowhere cannot be read"),
        ([TINY, "--compare", HERE], "has no evaluation.json: give the folder that"),
        ([TINY, "--compare", __file__], "was not written by `python -m april_rl evaluate`"),
        (["+recipe=tiny_cp"], "there is no recipe tiny_cp; did you mean tiny_cpu?"),
        (["+evaluation.sets.a={path: x}"], "model.path is not set"),
        ([TINY, "engine.max_model_len=100"], "rollout.max_response_tokens = 352, got 100"),
    ],
)
def test_a_wrong_or_ignored_setting_ends_in_one_message(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is started or written. Fails when a training setting is silently ignored."""
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *arguments]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert list(tmp_path.iterdir()) == []


def test_evaluate_gives_a_data_set_its_task_settings_as_training_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails when the path of the training data is forgotten: products of five digits would be
    asked.
    """
    asked: list[PromptSetConfig] = []

    def begin(config: TrainConfig, **_: object) -> None:
        asked.append(evaluation_set(config.data, config.evaluation.sets["held_out"]))
        raise RunError("enough")

    monkeypatch.setattr("april_rl.start.commands.evaluation_run.EvaluationRun", begin)
    assert main(["evaluate", "+recipe=smollm2_135m_cpu"]) == 1
    assert [chosen.args for chosen in asked] == [{"max_digits": 1}]


def test_ctrl_c_ends_in_one_word_and_leaves_no_empty_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the user sees a traceback, or a script cannot tell it from a mistake."""

    def begin(*_: object, folder: Path, **__: object) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("april_rl.start.commands.evaluation_run.EvaluationRun", begin)
    assert main(["evaluate", TINY, f"output={tmp_path / 'out'}"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "out").exists()


def test_an_evaluation_is_never_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "evaluation.json").write_text("mine")
    assert main(["evaluate", TINY, f"output={tmp_path}"]) == 1
    assert "already holds an evaluation" in capsys.readouterr().err
    assert (tmp_path / "evaluation.json").read_text() == "mine"


def test_a_comparison_without_a_common_set_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_report(Report(settings={}, sets={"aime": set_report([0.25])}), tmp_path)
    assert main(["evaluate", TINY, "--compare", str(tmp_path), f"output={tmp_path / 'out'}"]) == 1
    message = "no set in common; FILE has aime, this evaluation has held_out"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    report = Report(settings={"seed": 0}, sets={"aime": set_report([0.25, 0.5, 1.0])})
    path = write_report(report, tmp_path)
    assert read_report(path) == read_report(tmp_path) == report
    plain = json.loads(path.read_text())
    low = estimate([0.25, 0.5, 1.0]).low
    assert plain["sets"]["aime"]["estimates"]["avg_at_k"]["low"] == pytest.approx(low)
    path.write_text(json.dumps({**plain, "format": 99}))
    with pytest.raises(EvaluationError, match="has format 99, this version reads 1"):
        read_report(path)


def test_a_difference_pairs_the_prompts_that_both_evaluations_have() -> None:
    """The folder may have moved. Fails when rows are paired by their order."""
    first = set_report([0.0, 0.25, 0.5, 0.75, 1.0])
    second = set_report([0.25, 0.5, 0.5, 1.0, 1.0], folder="/elsewhere")
    shuffled = replace(second, prompts=second.prompts[:0:-1])  # without the first row
    found = difference(first, shuffled)
    assert found.num_prompts == 4
    assert found.changes["avg_at_k"] == paired_difference(
        [0.25, 0.5, 0.75, 1.0], [0.5, 0.5, 1.0, 1.0]
    )
    assert found.changes["avg_at_k"].value == pytest.approx(0.125)
    assert found.notes == ()


def test_metrics_that_depend_on_k_are_compared_only_for_the_same_k() -> None:
    """pass@8 is above pass@4 of the same model."""
    found = difference(set_report([0.0, 0.5]), set_report([0.0, 0.5], k=8))
    assert found.changes.keys() == {"avg_at_k"}
    assert found.notes == ("num_samples 4 → 8",)


def test_sets_without_a_common_prompt_are_refused() -> None:
    other = replace(set_report([0.5]), prompts=(PromptValues(source="b:0", answer="0", values={}),))
    with pytest.raises(EvaluationError, match="have no prompt in common"):
        difference(set_report([0.5]), other)


@pytest.mark.slow
def test_the_report_agrees_with_the_samples(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two data sets with their own settings, without data.path and without a learner; one of them
    is compared with an earlier evaluation at another temperature. Fails when a number is not
    computed from the written samples, when a set is sampled with the settings of the other one, or
    when a prompt that only one evaluation has counts in the difference.
    """
    task = write_task(tmp_path)
    sums = task / "sums.jsonl"
    earlier = earlier_evaluation(sums)
    (tmp_path / "before").mkdir()
    write_report(Report(settings={}, sets={"plain": earlier}), tmp_path / "before")
    own = f"{{path: {sums}, num_samples: 4, top_p: 0.000001, max_response_tokens: 5}}"
    arguments = [f"+evaluation.sets.greedy={own}", "evaluation.max_prompts=8"]
    capfd.readouterr()
    evaluate_plain(task, "out", *arguments, "--compare", str(tmp_path / "before"))
    printed = capfd.readouterr()
    assert printed.err == ""
    report = read_report(tmp_path / "out")
    for name, k, budget in (("plain", 3, 9), ("greedy", 4, 5)):
        records = samples_of(tmp_path / "out", name)
        rewards = np.array([record["reward"] for record in records]).reshape(8, k)
        found = report.sets[name]
        assert found.estimates["avg_at_k"] == pytest.approx(estimate(rewards.mean(axis=1)))
        assert found.estimates["pass_at_k"] == pytest.approx(estimate(passes(rewards, k=k)))
        averages = [prompt.values["avg_at_k"] for prompt in found.prompts]
        assert averages == pytest.approx(rewards.mean(axis=1).tolist())
        tokens = [record["num_tokens"] for record in records]
        assert found.response_tokens_mean == pytest.approx(np.mean(tokens))
        assert max(tokens) == budget
        cut = [record["finish_reason"] == "length" for record in records]
        assert found.truncated_frac == pytest.approx(np.mean(cut))
        assert [record["reward"] for record in records] == [
            float(len(record["response"]) % 2 == 0) for record in records
        ]
        assert [record["prompt"] for record in records[::k]] == [f"0+{b}=" for b in range(6)] + [
            "1+0=",
            "1+1=",
        ]
        assert str(found.estimates["avg_at_k"]) in printed.out
        of_prompts = [{r["response"] for r in records[i : i + k]} for i in range(0, 8 * k, k)]
        assert (max(map(len, of_prompts)) == 1) is (name == "greedy")
    assert isinstance(report.sets["plain"].estimates["avg_at_k"], Estimate)
    assert report.settings["model"]["path"] == str(task / "model")
    assert not list(tmp_path.glob("**/metrics.jsonl"))
    check_difference(printed.out, earlier, tmp_path / "out")


def earlier_evaluation(sums: Path) -> SetReport:
    """Return an evaluation of twelve prompts of `sums` with three samples each, at another
    temperature.
    """
    averages = [prompt % 4 / 3 for prompt in range(12)]
    report = set_report(averages)
    prompts = [
        replace(prompt, source=f"{sums}:{place + 1}", answer=str(place // 6 + place % 6))
        for place, prompt in enumerate(report.prompts)
    ]
    sampling = SetSampling(
        num_samples=3, temperature=0.5, top_p=1.0, max_response_tokens=9, max_prompts=12
    )
    return replace(report, path=str(sums), sampling=sampling, prompts=tuple(prompts))


def evaluate_plain(task: Path, output: str, *arguments: str) -> None:
    """Run the command on the set `plain` with three samples per prompt and nine tokens
    per sample.
    """
    settings = [
        f"model.path={task / 'model'}",
        f"+evaluation.sets.plain={{path: {task / 'sums.jsonl'}}}",
        "evaluation.num_samples=3",
        "evaluation.max_response_tokens=9",
        "data.template=plain",
        "data.max_prompt_tokens=16",
        "reward.function=reward_functions:even_length",
        "reward.num_processes=1",
        "engine.kv_cache_gib=0.25",
        "runtime.device=cpu",
        "runtime.threads=1",
        f"output={task / output}",
    ]
    assert main(["evaluate", *settings, *arguments]) == 0


def samples_of(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "samples" / f"eval_{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_difference(printed: str, before: SetReport, after: Path) -> None:
    """Check that the printed and written numbers equal those computed from the samples of the same
    prompts.
    """
    by_prompt: dict[str, list[float]] = {}
    for record in samples_of(after, "plain"):
        by_prompt.setdefault(record["prompt"], []).append(record["reward"])
    rewards = list(by_prompt.values())
    earlier = [prompt.values for prompt in before.prompts[: len(rewards)]]
    expected = {
        "avg_at_k": paired_difference(
            [values["avg_at_k"] for values in earlier], [np.mean(of_one) for of_one in rewards]
        ),
        "pass_at_k": paired_difference(
            [values["pass_at_k"] for values in earlier],
            [float(max(of_one) > 0.5) for of_one in rewards],
        ),
    }
    written = json.loads((after / "comparison.json").read_text())
    assert written.keys() == {"plain"}
    assert written["plain"]["num_prompts"] == len(rewards) == 8
    assert written["plain"]["notes"] == ["temperature 0.5 → 1.0", "max_prompts 12 → 8"]
    for key, change in expected.items():
        found = written["plain"]["changes"][key]
        assert found == pytest.approx(change._asdict())
        shown = f"{key.partition('_')[0]}@k {change.value:+.3f} [{change.low:+.3f}, "
        assert f"{shown}{change.high:+.3f}]" in printed
    assert "plain, 8 common prompts: avg@k" in printed
    assert "  sampled differently: temperature 0.5 → 1.0, max_prompts 12 → 8" in printed
