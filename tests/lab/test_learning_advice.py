"""Advice about learning: what a planted fault says, and that healthy runs say nothing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import make_run

from april_rl.lab.report.learning_advice import learning_advice
from april_rl.lab.report.run_files import RunFiles, read_run

NUMBERS = [(n, n * 7 % 13) for n in range(9)]
PROSE = " ".join(f"Step {n}: we add {n} and {m}, and get {n + m}." for n, m in NUMBERS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "run", response=PROSE))


def with_rows(run: RunFiles, **series: Sequence[float]) -> RunFiles:
    """Return the run with other values of some metrics, one for each row."""
    rows = [
        {**row, **{key.replace("__", "/"): values[n] for key, values in series.items()}}
        for n, row in enumerate(run.rows)
    ]
    return replace(run, rows=rows)


def with_samples(folder: Path, change: Callable[[int], dict[str, object]]) -> RunFiles:
    """Return a run in which `change` says what is different in the samples after its first step."""
    run_dir = make_run(folder / "run", response=PROSE)
    for path in sorted((run_dir / "samples").glob("step_*.jsonl"))[1:]:
        samples = map(json.loads, path.read_text(encoding="utf-8").strip().split("\n"))
        changed = [json.dumps(sample | change(n)) for n, sample in enumerate(samples)]
        path.write_text("\n".join(changed), encoding="utf-8")
    return read_run(run_dir)


def test_a_healthy_run_gets_no_advice(run: RunFiles) -> None:
    assert len(run.rows) == 7
    assert list(learning_advice(run)) == []


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.3] * 4 + [0.8] * 3, "learns what the reward pays, and not the task"),
        ([0.6] * 4 + [0.1] * 3, "Continue from the checkpoint before step 3"),
    ],
)
def test_a_held_out_accuracy_that_falls_is_named(run, rewards, said) -> None:
    accuracy = [0.5, 0.6, 0.7, 0.8, 0.7, 0.6, 0.4]
    key = "eval/held_out/avg_at_k"
    series = {key: accuracy, "reward/mean": rewards}
    series[f"{key}_low"] = [each - 0.1 for each in accuracy]
    series[f"{key}_high"] = [each + 0.1 for each in accuracy]
    [advice] = learning_advice(with_rows(run, **series))
    assert advice.startswith("held_out fell from 0.800 at step 3 to 0.400 (avg@k)")
    assert said in advice
    within = {**series, f"{key}_high": [each + 0.35 for each in accuracy]}
    assert list(learning_advice(with_rows(run, **within))) == [], "the intervals overlap"


@pytest.mark.parametrize(("paid", "num"), [("length", 1), ("stop", 0)])
def test_a_reward_that_pays_for_being_cut_off_is_named(tmp_path, paid, num) -> None:
    """In every group two of four responses are cut off, and these are paid, or the others."""

    def change(n: int) -> dict[str, object]:
        reason = ("length", "stop")[n % 2]
        return {"finish_reason": reason, "reward": float(reason == paid)}

    found = list(learning_advice(with_samples(tmp_path, change)))
    assert len(found) == num
    assert all("are paid 1.00 more than finished ones" in advice for advice in found)


def test_responses_that_repeat_themselves_are_named(tmp_path) -> None:
    loop = "the answer is 7, so the answer is 7, " * 40
    [advice] = learning_advice(with_samples(tmp_path, lambda _: {"response": loop}))
    assert advice.startswith("Long responses repeat themselves: compressed they have ")
    short = with_samples(tmp_path / "short", lambda _: {"response": "7 7 7 7"})
    assert list(learning_advice(short)) == []


def test_a_mismatch_that_grows_with_depth_is_named(run) -> None:
    near, far = "mismatch__to_512_tokens", "mismatch__to_4096_tokens"
    grows = with_rows(run, **{near: [0.004] * 7, far: [0.06] * 7})
    [advice] = learning_advice(grows)
    assert "0.0040 nats up to 512 tokens, 0.0600 up to 4,096" in advice
    assert list(learning_advice(with_rows(run, **{near: [0.004] * 7, far: [0.005] * 7}))) == []
