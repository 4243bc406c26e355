"""Rows in the schemas of the published data sets go through template, tokens and reward: the reward
accepts what the prompt asks for.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reward_pools import reward_pool
from test_rewards_decoding import byte_tokenizer, sample

import april_rl
from april_rl.config.choices import Extract
from april_rl.config.task import PromptSetConfig, RewardConfig
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import load_tokenizer

SCHEMAS = Path(april_rl.__file__).parent / "lab" / "rehearsal" / "schemas"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOX = "Please reason step by step, and put your final answer within \\boxed{}."
LINE = "End with a line of the form Answer: X where X is the answer."


OF_PROBLEM = {"prompt_column": "problem", "instruction": BOX}
OF_QUESTION = {"prompt_column": "question", "answer_column": "final_answer", "instruction": BOX}
SETS = {
    "dapo_math_17k": {"answer_column": "reward_model.ground_truth"},
    "deepscaler": OF_PROBLEM,
    "deepmath_103k": OF_QUESTION,
    "skywork_or1_math": {"answer_column": "reward_model.ground_truth", "instruction": BOX},
    "gsm8k": {"prompt_column": "question", "answer_pattern": r"####\s*(.+)", "instruction": LINE},
    "math": OF_PROBLEM | {"answer_column": "solution"},
    "math_500": OF_PROBLEM,
    "aime_2024": OF_PROBLEM,
    "aime_2025": OF_PROBLEM | {"instruction": LINE},
    "amc_2023": OF_PROBLEM,
    "olympiadbench": OF_QUESTION,
}


def state_as_asked(prompt, answer):
    """Return a response in the form that the prompt's own text asks for."""
    asks_line = re.search(r"of the form Answer:", prompt) is not None
    assert asks_line != ("\\boxed{}" in prompt)
    plain = answer[answer.index("{") + 1 : answer.rindex("}")] if "\\boxed" in answer else answer
    last = f"Answer: ${plain.strip('$')}$" if asks_line else f"So it is $\\boxed{{{plain}}}$."
    return f"<think>\nFirst I try \\boxed{{-1}}.\nAnswer: -1\n</think>\n\nAs shown.\n\n{last}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = byte_tokenizer()
    made.chat_template = CHAT
    made.save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def scorer(tokenizer):
    reward = RewardConfig(extract=Extract.auto, num_processes=1)
    with reward_pool(reward, decode=tokenizer.decoder()) as pool:
        yield pool


@pytest.mark.parametrize("published", SETS)
def test_the_right_answer_in_the_requested_form_is_rewarded_and_a_wrong_one_is_not(
    published, tokenizer, scorer
):
    """Fails when the reward reads another form than the prompt asks for, as it once did
    for DAPO.
    """
    chosen = PromptSetConfig(path=str(SCHEMAS / f"{published}.jsonl"), **SETS[published])
    prompts = load_prompts(chosen, tokenizer, key="data.path", max_prompt_tokens=10_000)
    assert len(prompts) > 3
    for number, prompt in enumerate(prompts):
        right = state_as_asked(prompt.text, prompt.answer)
        wrong = state_as_asked(prompt.text, "-987")
        hedged = f"{right}\n{wrong.rpartition('</think>')[2]}"
        texts = tokenizer.encode([right, wrong, hedged], add_special_tokens=False)
        for index, token_ids in enumerate(texts):
            scored = sample(3 * number + index, token_ids, prompt.answer)
            scorer.submit(scored, group_size=1)
    assert [score.value for score in scorer.collect(None)] == [1.0, 0.0, 0.0] * len(prompts)
