"""The tiny task: its problems, its tokenizer, its files in the package, and a policy that stops."""

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_tree import ROOT
from tiny_task import problems as task
from tiny_task.tokenizer import build_tokenizer

from april_rl.errors import RunError
from april_rl.tiny import builtins

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


def test_training_and_warm_start_problems_contain_no_held_out_one() -> None:
    held_out = task.held_out_problems(256)
    training = task.training_problems(5000, seed=0, held_out=held_out)
    assert len(set(held_out)) == 256
    assert not set(held_out) & set(training)
    assert not set(held_out) & set(task.warm_start_problems(5000))


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
        assert builtins.resolve(path) == path


@pytest.mark.parametrize(
    ("key", "fitting"),
    [
        ("data.path", "builtin:arithmetic or builtin:arithmetic_held_out"),
        ("model.path", "builtin:tiny or builtin:tiny_teacher"),
    ],
)
def test_an_unknown_builtin_is_refused_with_the_valid_names_for_the_setting(key, fitting) -> None:
    with pytest.raises(RunError) as caught:
        builtins.resolve("builtin:nope", key=key)
    assert str(caught.value) == f"{key}=builtin:nope: no such builtin; choose {fitting}"


def test_the_problem_files_of_the_package_match_what_the_task_draws() -> None:
    """Fails when the task changes and `tools/tiny_policy.py` was not run."""
    held_out = task.held_out_problems(task.NUM_HELD_OUT)
    for name, problems in (("arithmetic", task.rl_problems()), ("arithmetic_held_out", held_out)):
        lines = Path(builtins.resolve(f"builtin:{name}")).read_text().splitlines()
        expected = [{"prompt": p.prompt, "answer": p.answer} for p in problems]
        assert [json.loads(line) for line in lines] == expected


def test_the_policy_of_the_package_has_the_shape_and_tokenizer_that_the_warm_start_builds() -> None:
    """Fails when either changes and `tools/tiny_policy.py` was not run."""
    from tiny_task.warm_start import WarmStart, build_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, tokenizer = builtins.resolve("builtin:tiny"), build_tokenizer()
    shipped = AutoTokenizer.from_pretrained(folder)
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.chat_template == tokenizer.chat_template
    assert shipped("a1+b12=\\boxed{13}") == tokenizer("a1+b12=\\boxed{13}")
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = build_model(WarmStart(), tokenizer)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in expected.state_dict().items()
    }
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    assert size < 2 * 2**20, "the package carries it"


def test_a_data_set_of_messages_gives_the_tiny_policy_the_tokens_of_the_plain_sums(
    tmp_path,
) -> None:
    """Fails when a conversational data set cannot be tried with builtin:tiny."""
    from april_rl.config.task import PromptSetConfig
    from april_rl.data.prompts import load_prompts
    from april_rl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(builtins.resolve("builtin:tiny"))
    sums = [problem.prompt for problem in drawn(20)]
    chats = [
        {"messages": [{"role": "user", "content": s}], "prompt": s, "answer": "1"} for s in sums
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chats))
    read = [
        [
            prompt.token_ids
            for prompt in load_prompts(chosen, tokenizer, key="p", max_prompt_tokens=200)
        ]
        for chosen in (
            PromptSetConfig(path=str(path), prompt_column="messages"),
            PromptSetConfig(path=str(path), template="plain"),
        )
    ]
    assert read[0] == read[1]
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "a1+b2="}]
    assert tokenizer.chat_text(messages) == "add a1+b2="


def test_finding_the_problems_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from april_rl.tiny.builtins import resolve; resolve('builtin:arithmetic'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_warm_started_policy_stops_by_itself() -> None:
    import torch
    from tiny_task.warm_start import WarmStart, warm_start

    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    small = WarmStart(hidden_size=64, intermediate_size=128, num_heads=2, num_rows=1000)
    problems = [p for p in task.warm_start_problems(4000) if len(p.operands) <= 5]
    model = warm_start(small, problems[:1000], tokenizer)
    prompts = tokenizer(["a1+b2+c3="] * 64, return_tensors="pt")
    responses = model.generate(**prompts, max_new_tokens=64)[:, prompts["input_ids"].shape[1] :]
    stopped = (responses == tokenizer.eos_token_id).any(dim=1)
    assert stopped.float().mean() > 0.8
    assert "\\boxed{" in tokenizer.decode(responses[0])


@pytest.mark.soak
def test_a_policy_trained_again_is_as_accurate_as_the_one_of_the_package(tmp_path: Path) -> None:
    """By held-out avg@4 with the real engine; the two may differ because other CPUs round
    differently.
    """
    from april_rl.commands.evaluate import main
    from april_rl.evaluation.report import FILE_NAME, read_report

    subprocess.run([sys.executable, ROOT / "tools" / "tiny_policy.py", tmp_path], check=True)
    accuracy = {}
    for name, model in (("package", "builtin:tiny"), ("made", tmp_path / builtins.POLICY)):
        settings = [f"model.path={model}", "evaluation.num_samples=4", f"output={tmp_path / name}"]
        assert main(["+recipe=tiny_cpu", *settings]) == 0
        report = read_report(tmp_path / name / FILE_NAME)
        accuracy[name] = report.sets["held_out"].estimates["avg_at_k"].value
    assert 0.3 < accuracy["package"] < 0.5, "RL has a signal, and room"
    assert abs(accuracy["made"] - accuracy["package"]) < 0.05
