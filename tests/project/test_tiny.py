"""The tiny task: its problems, its tokenizer, its files in the package."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from april_rl.errors import RunError
from april_rl.task.tiny import builtins

MAX_BYTES = 2 << 20  # of a policy, which the package carries


def rows_of(name: str) -> list[dict[str, str]]:
    lines = Path(builtins.resolve(f"builtin:{name}")).read_text().splitlines()
    return [json.loads(line) for line in lines]


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


def test_the_answers_are_the_sums_of_the_prompts_and_no_held_out_one_is_trained() -> None:
    training, held_out = rows_of("arithmetic"), rows_of("arithmetic_held_out")
    for row in (*training, *held_out):
        assert row["answer"] == str(sum(map(int, re.findall(r"\d+", row["prompt"]))))
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}


@pytest.mark.parametrize("name", ["tiny", "tiny_teacher"])
def test_a_model_of_the_package_is_small_and_its_tokenizer_returns_the_text(name) -> None:
    from transformers import AutoTokenizer

    folder = builtins.resolve(f"builtin:{name}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "a1+b12=\\boxed{13}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("\\boxed{", "#"))
    assert sum(path.stat().st_size for path in Path(folder).iterdir()) < MAX_BYTES


def test_a_data_set_of_messages_gives_the_tiny_policy_the_tokens_of_the_plain_sums(
    tmp_path,
) -> None:
    """Fails when a conversational data set cannot be tried with builtin:tiny."""
    from april_rl.config.task import PromptSetConfig
    from april_rl.task.data.prompts import load_prompts
    from april_rl.task.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(builtins.resolve("builtin:tiny"))
    sums = [row["prompt"] for row in rows_of("arithmetic")[:20]]
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
        "import sys; from april_rl.task.tiny.builtins import resolve; "
        "resolve('builtin:arithmetic'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
