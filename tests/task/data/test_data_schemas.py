"""Published data sets can be read with only the settings in docs/data.md."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from source_tree import PACKAGE, ROOT
from word_tokenizer import hf_tokenizer

from april_rl.config.prompt_sets import evaluation_set, training_sets
from april_rl.config.task import DataConfig, EvaluationSetConfig, PromptSetConfig, SourceConfig
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer

FIXTURES = PACKAGE / "lab" / "rehearsal" / "schemas"
DOCUMENT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)]
SETTINGS = next(block for block in BLOCKS if "gsm8k" in block)
ASKED_ANOTHER_WAY = next(block for block in BLOCKS if "prompt_pattern" in block)
# The beginning of the question and the answer of the first row.
FIRST = {
    "dapo_math_17k": ("Solve the following math problem step by step. The last line", "10"),
    "deepscaler": (r"What is $\frac{1}{3}+\frac{1}{6}$?", r"\frac{1}{2}"),
    "deepmath_103k": (r"What is $\frac{1}{3}+\frac{1}{6}$?", r"\frac{1}{2}"),
    "gsm8k": ("Ana has 12 stickers", "8"),
    "skywork_or1_math": (r"What is $\frac{1}{3}+\frac{1}{6}$?", r"\frac{1}{2}"),
    "math": (
        r"What is $\frac{1}{3}+\frac{1}{6}$?",
        r"After some steps the result is $\boxed{\frac{1}{2}}$.",
    ),
    "math_500": (r"What is $\frac{1}{3}+\frac{1}{6}$?", r"\frac{1}{2}"),
    "aime_2024": ("A box holds 3 red and 5 blue pens.", "10"),
    "aime_2025": ("A box holds 3 red and 5 blue pens.", "10"),
    "amc_2023": ("A box holds 3 red and 5 blue pens.", "10"),
    "olympiadbench": (r"What is $\frac{1}{3}+\frac{1}{6}$?", r"$\frac{1}{2}$"),
}


TOKENIZER = Tokenizer(hf_tokenizer(), path="models/words")


def read(name, chosen):
    """Return the prompts that these settings make from our rows in the schema `name`."""
    chosen.path = str(FIXTURES / f"{name}.jsonl")
    return load_prompts(chosen, TOKENIZER, key="data.path", max_prompt_tokens=500)


def test_the_page_and_the_rows_have_the_same_schemas():
    assert sorted(SETTINGS) == sorted(path.stem for path in FIXTURES.glob("*.jsonl"))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_published_schema_is_read_with_only_its_settings(name):
    """As the only training set, as a source, and as an evaluation set next to another schema."""
    others = DataConfig(path="x", prompt_column="no", answer_column="no")
    source = SourceConfig(**({"answer_column": "answer"} | SETTINGS[name]))
    held_out = EvaluationSetConfig(**({"answer_column": "answer"} | SETTINGS[name]))
    tables = [
        read(name, training_sets(DataConfig(**SETTINGS[name]))[""]),
        read(name, training_sets(DataConfig(path="", sources={name: source}))[name]),
        read(name, evaluation_set(others, held_out)),
    ]
    question, answer = FIRST[name]
    for table in tables:
        assert table[0].text.startswith(f"user {question}")
        assert table[0].answer == answer
        assert len(table) >= 5
        assert not any("####" in p.answer for p in table)


def test_the_questions_of_dapo_can_be_asked_in_another_way():
    settings = {**SETTINGS["dapo_math_17k"], **ASKED_ANOTHER_WAY}
    texts = [p.text for p in read("dapo_math_17k", training_sets(DataConfig(**settings))[""])]
    assert all(re.fullmatch(r"user .+\n\nPut your .+ <eos> assistant", text) for text in texts)
    assert not any("Answer:" in text or "step by step" in text for text in texts)


@pytest.mark.parametrize(
    "solution",
    [r"So it is $\boxed 2$.", r"So $x=\boxed{2}$ or $x=\boxed{5}$.", r"\fbox{1}, \boxed{2}"],
)
def test_a_solution_of_math_reaches_the_reward_completely(solution, tmp_path):
    """Its box may lack braces, and there may be several. Fails when a pattern refuses a row."""
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "one", "solution": solution}))
    chosen = training_sets(DataConfig(**{**SETTINGS["math"], "path": str(path)}))[""]
    (prompt,) = load_prompts(chosen, TOKENIZER, key="data.path", max_prompt_tokens=500)
    assert prompt.answer == solution


def test_the_command_that_converts_lists_writes_readable_rows(tmp_path):
    (line,) = re.findall(r"^(python -c '.+json.load.+')", DOCUMENT, flags=re.M)
    rows = [
        [{"from": "human", "value": "one"}, {"from": "assistant", "ground_truth": {"value": "2"}}]
    ]
    program = shlex.split(line)[2]
    ran = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=True,
    )
    path = tmp_path / "orz.jsonl"
    path.write_text(ran.stdout)
    chosen = PromptSetConfig(path=str(path))
    (prompt,) = load_prompts(chosen, TOKENIZER, key="data.path", max_prompt_tokens=500)
    assert (prompt.text, prompt.answer) == ("user one <eos> assistant", "2")
