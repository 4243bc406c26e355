"""The tiny task: its problems, its tokenizer, its cache, and a policy that learns to stop."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april_rl.errors import RunError
from april_rl.tiny import prepare, task
from april_rl.tiny.tokenizer import build_tokenizer

SUM = re.compile(r"([a-z])(\d+)")


def drawn(count: int) -> list[task.Problem]:
    random = Random(0)
    return [task.draw_problem(random) for _ in range(count)]


def boxed(solution: str) -> str:
    return re.findall(r"\\boxed\{(\d+)\}", solution)[-1]


def num_tokens(solution: str) -> int:
    return len(solution.replace("\\boxed{", "#")) + 1  # and <eos>


def test_the_answer_is_the_sum_of_the_operands_in_the_prompt() -> None:
    for problem in drawn(500):
        assert problem.answer == str(sum(int(n) for _, n in SUM.findall(problem.prompt)))
        assert [label for label, _ in SUM.findall(problem.prompt)] == list(
            task.LABELS[: len(problem.operands)]
        )


def test_a_thorough_solution_boxes_the_answer_and_every_line_of_it_is_true() -> None:
    for problem in drawn(200):
        text = task.solution(problem, len(problem.operands))
        total = problem.operands[0]
        for operand, running in re.findall(r"[a-z](\d+)=(\d+)", text):
            total += int(operand)
            assert int(running) == total
        assert boxed(text) == problem.answer


def test_a_hasty_solution_is_shorter_and_wrong() -> None:
    for problem in drawn(200):
        for num_terms in range(1, len(problem.operands)):
            text = task.solution(problem, num_terms)
            assert boxed(text) != problem.answer
            assert len(text) < len(task.solution(problem, len(problem.operands)))


def test_thorough_and_hasty_solutions_have_their_stated_shares() -> None:
    random = Random(1)
    problems = drawn(4000)
    wrong = sum(boxed(task.worked_solution(p, random)) != p.answer for p in problems)
    assert wrong / len(problems) == pytest.approx(task.HASTY_FRACTION, abs=0.03)


def test_response_lengths_have_a_long_tail_and_fit_the_budget() -> None:
    random = Random(2)
    lengths = sorted(num_tokens(task.worked_solution(p, random)) for p in drawn(20_000))
    median, p99 = lengths[10_000], lengths[19_800]
    assert 20 <= median <= 40
    assert p99 / median >= 5
    assert lengths[-1] <= 256


def test_training_and_warm_start_problems_hold_no_held_out_one() -> None:
    held_out = task.held_out_problems(256)
    training = task.training_problems(5000, seed=0, held_out=held_out)
    assert len(set(held_out)) == 256
    assert not set(held_out) & set(training)
    assert not set(held_out) & set(prepare.warm_start_problems(5000))


def test_equal_seeds_draw_equal_problems_and_other_seeds_others() -> None:
    held_out = task.held_out_problems(8)
    first = task.training_problems(100, seed=3, held_out=held_out)
    assert first == task.training_problems(100, seed=3, held_out=held_out)
    assert first != task.training_problems(100, seed=4, held_out=held_out)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*"0123456789abcxyz+= }", "\\boxed{"])).map("".join))
def test_the_tokenizer_returns_the_text_it_was_given(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("\\boxed{", "#"))
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_paths_that_are_not_builtin_are_returned_unchanged() -> None:
    for path in ("Qwen/Qwen3-4B", "/data/train.jsonl", "builtin"):
        assert prepare.resolve(path) == path


def test_an_unknown_builtin_is_refused_with_the_known_ones() -> None:
    expected = r"data\.path=builtin:nope: .*builtin:tiny, builtin:arithmetic, "
    with pytest.raises(RunError, match=expected):
        prepare.resolve("builtin:nope", key="data.path")


def test_problem_files_are_cached_and_hold_prompts_with_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APRIL_RL_CACHE", str(tmp_path))
    path = Path(prepare.resolve("builtin:arithmetic"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == prepare.NUM_TRAINING_ROWS
    assert set(rows[0]) == {"prompt", "answer"}
    held_out = Path(prepare.resolve("builtin:arithmetic_held_out")).read_text().splitlines()
    assert len(held_out) == prepare.NUM_HELD_OUT_ROWS
    written_at = path.stat().st_mtime_ns
    assert prepare.resolve("builtin:arithmetic") == str(path)
    assert path.stat().st_mtime_ns == written_at


def test_a_cache_folder_that_cannot_be_made_names_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("APRIL_RL_CACHE", str(file / "cache"))
    for path in ("builtin:arithmetic", "builtin:tiny"):
        with pytest.raises(prepare.CacheError, match="set APRIL_RL_CACHE"):
            prepare.resolve(path)


def test_an_interrupted_build_leaves_nothing_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    folder = tmp_path / "thing"

    def interrupted(unfinished: Path) -> None:
        (unfinished / "half").write_text("")
        raise KeyboardInterrupt

    def whole(unfinished: Path) -> None:
        assert list(unfinished.iterdir()) == []
        (unfinished / "whole").write_text("")

    with pytest.raises(KeyboardInterrupt):
        prepare.build_once(folder, interrupted)
    assert not folder.exists()
    prepare.build_once(folder, whole)
    assert [file.name for file in folder.iterdir()] == ["whole"]


def test_concurrent_builders_build_once(tmp_path: Path) -> None:
    builds: list[Path] = []

    def slow(unfinished: Path) -> None:
        builds.append(unfinished)
        time.sleep(0.2)

    builders = [
        threading.Thread(target=prepare.build_once, args=(tmp_path / "thing", slow))
        for _ in range(3)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(builds) == 1
    assert (tmp_path / "thing").is_dir()


def test_a_builder_says_what_it_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and only when it takes long. Fails when the lock is waited for without a word."""
    folder, other = tmp_path / "thing", tmp_path / "other"
    is_said, is_building = threading.Event(), threading.Event()

    def endless(_: Path) -> None:
        is_building.set()
        assert is_said.wait(30)

    builder = threading.Thread(target=prepare.build_once, args=(folder, endless))
    builder.start()
    assert is_building.wait(30)
    prepare.build_once(other, lambda _: None)
    assert capsys.readouterr().err == ""
    waiting = threading.Thread(target=prepare.build_once, args=(folder, endless))
    waiting.start()
    said, deadline = "", time.monotonic() + 10
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
        said = capsys.readouterr().err
    is_said.set()
    builder.join()
    waiting.join()
    assert said == f"another process is building {folder}; waiting for it\n"
    assert capsys.readouterr().err == ""


def test_asking_for_problems_loads_neither_torch_nor_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APRIL_RL_CACHE", str(tmp_path))
    code = (
        "import sys; from april_rl.tiny.prepare import resolve; resolve('builtin:arithmetic'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_warm_started_policy_stops_by_itself() -> None:
    import torch

    from april_rl.tiny.warm_start import Progress, WarmStart, warm_start

    torch.set_num_threads(1)
    steps: list[Progress] = []
    tokenizer = build_tokenizer()
    small = WarmStart(hidden_size=64, intermediate_size=128, num_heads=2, num_rows=1000)
    problems = [p for p in prepare.warm_start_problems(4000) if len(p.operands) <= 5]
    model = warm_start(small, problems[:1000], tokenizer, report=steps.append)
    assert steps[-1].step == steps[-1].num_steps
    assert steps[-1].loss < 0.6 * steps[0].loss
    prompts = tokenizer(["a1+b2+c3="] * 64, return_tensors="pt")
    responses = model.generate(**prompts, max_new_tokens=64)[:, prompts["input_ids"].shape[1] :]
    stopped = (responses == tokenizer.eos_token_id).any(dim=1)
    assert stopped.float().mean() > 0.8
    assert "\\boxed{" in tokenizer.decode(responses[0])
