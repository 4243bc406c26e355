"""Data sets with code tests are read and scored with only the settings in docs/data.md."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from datasets import Dataset
from reward_pools import reward_pool
from source_tree import ROOT
from word_tokenizer import hf_tokenizer

from april_rl.config.task import PromptSetConfig, RewardConfig
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.task.rewards.check import check_tests

DOCUMENT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)]
SETTINGS = next(block for block in BLOCKS if "humaneval" in block)
QUESTION = "Add two numbers."
FUNCTION, METHOD, PROGRAM = (
    "def add(a, b):\n    return a + b",
    "class Solution:\n    def add(self, a, b):\n        return a + b",
    "a, b = map(int, input().split())\nprint(a + b)",
)

CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": QUESTION}]
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
LINES = {"input": "1\n2", "output": "3"}
CALLS = {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}


def eurus(tests):
    return {
        "data_source": "taco",
        "prompt": CHAT,
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
        "extra_info": {"index": 0, "split": "dummy"},
    }


def open_r1(**case):
    absent = {"fn_name": None, "input": None, "output": None, "type": None}
    return {
        "source": "apps",
        "problem": f"{QUESTION} {case['type']}",
        "gold_standard_solution": None,
        "verification_info": {"language": "python", "test_cases": [absent | case]},
        "problem_id": "vcp_0",
    }


def livecodebench(kind, metadata, case):
    return {
        "question_title": "Sum",
        "question_content": f"{QUESTION} {kind}",
        "question_id": "1",
        "starter_code": "",
        "public_test_cases": json.dumps([case | {"testtype": kind}]),
        "private_test_cases": "eJxrYJmqwcUABB",
        "metadata": json.dumps(metadata),
    }


# Rows in the published schemas, each with a correct program.
ROWS = {
    "eurus_2_code": [(eurus(STDIN), PROGRAM), (eurus(CALLS), FUNCTION)],
    "open_r1_python": [
        (open_r1(type="stdin_stdout", input="1 2\n", output="3\n"), PROGRAM),
        (open_r1(type="function_call", fn_name="add", input="1\n2", output="3"), FUNCTION),
    ],
    "livecodebench": [
        (livecodebench("stdin", {}, {"input": "1 2\n", "output": "3\n"}), PROGRAM),
        (livecodebench("functional", {"func_name": "add"}, LINES), METHOD),
    ],
    "humaneval": [
        (
            {
                "task_id": "HumanEval/0",
                "prompt": f'def add(a, b):\n    """{QUESTION}"""\n',
                "canonical_solution": "    return a + b\n",
                "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n",
                "entry_point": "add",
            },
            FUNCTION,
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_data_set_with_code_tests_rewards_only_correct_programs(tmp_path, name, suffix):
    rows, programs = zip(*ROWS[name], strict=True)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        Dataset.from_list(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = PromptSetConfig(**{"answer_column": "answer"} | SETTINGS[name]["data"])
    chosen.path = str(path)
    arguments = SETTINGS[name]["reward"] | {"sandbox": "none"}
    reward = RewardConfig(function="code", args=arguments, num_processes=1)
    with reward_pool(reward) as pool:
        prompts = load_prompts(
            chosen,
            Tokenizer(hf_tokenizer(), path="models/words"),
            key="data.path",
            columns=pool.columns_of(""),
            max_prompt_tokens=500,
        )
        check_tests(pool, prompts)
        assert len(prompts) == len(rows)
        for prompt, right in zip(prompts, programs, strict=True):
            responses = [f"```python\n{p}\n```" for p in (right, right.replace("+", "-"), "pass")]
            values = [scores[0].value for scores in pool.try_on(prompt, responses)]
            assert values == [1.0, 0.0, 0.0]


def test_the_page_and_the_rows_have_the_same_data_sets():
    assert [*SETTINGS] == [*ROWS]
