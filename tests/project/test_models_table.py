"""The learner computes what transformers computes, for the architectures that differ most."""

import re
from dataclasses import replace

import pytest
from learner_setup import group_of_one
from models.page import Result, engine_cells
from models.tiny_architectures import model_types
from models_table import PAGE, judge

# Each one tests something special; `python tools/models_table.py --check` tries all.
SAMPLE = {
    "mistral": "a window in every layer",
    "qwen2": "a window in some layers, and biases",
    "gemma3_text": "windows and full attention by turns, with a rotary base each",
    "olmo3": "norms of queries and keys, windows",
    "cohere2": "scaled logits, layers without rotary positions",
    "granitemoe": "divided logits, experts",
    "hyperclovax": "multiplied logits",
    "nanochat": "a soft cap",
    "phimoe": "a router that samples while it trains",
    "afmoe": "gated attention",
    "gpt_oss": "sinks",
    "gemma2": "a soft cap in attention",
    "qwen3_5": "a gated delta net, in a multimodal model",
    "falcon_h1": "Mamba beside attention",
    "longcat_flash": "a frozen bias of the router",
    "deepseek_v32": "indexed attention",
}


@pytest.fixture(scope="module", autouse=True)
def _group():
    with group_of_one():
        yield


@pytest.mark.filterwarnings("ignore")  # transformers warns about tiny configurations
@pytest.mark.parametrize("model_type", SAMPLE)
def test_an_architecture_is_right_or_refused_as_the_page_says(model_type):
    """Within 1e-5 nats of transformers' own logits, with sequences longer than every window."""
    verdict, text = judge(model_type), PAGE.read_text()
    assert verdict.result in (Result.right, Result.refused)
    assert str(replace(verdict, **engine_cells(text)[model_type])) in text.splitlines()


def test_the_page_has_every_architecture_once_and_no_wrong_one():
    """At least 90 are right. Fails when transformers adds one that was not tried."""
    rows = re.findall(r"^\| `(\S+)` \| ([\w ]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(model_type for model_type, _ in rows) == model_types()
    results = [result for _, result in rows]
    assert results.count("right") >= 90
    assert "WRONG" not in results
