"""What is found out about the model before anything is started."""

from __future__ import annotations

import re

import pytest
from transformers import GPT2Config, GPTNeoConfig, MambaConfig, Qwen3Config, T5Config

from april_rl.runtime.preflight import PreflightError, check_start, model_facts


def start(path, *, window_tokens, window_key, reference_bytes=0):
    return check_start(
        model_path=str(path),
        device="cpu",
        num_workers=1,
        is_cluster=False,
        window_tokens=window_tokens,
        window_key=window_key,
        reference_bytes=reference_bytes,
    )


def small_qwen3(tmp_path):
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path)
    return tmp_path


def test_the_facts_of_a_dense_decoder_are_read(tmp_path):
    """Queries, keys, values and output 4·64·64 - 2·2·16·64, MLP 3·64·96, embeddings 100·64."""
    facts = model_facts(str(small_qwen3(tmp_path)))
    assert (facts.window_tokens, facts.hidden_size) == (512, 64)
    assert facts.num_parameters == 2 * (4 * 64 * 64 - 2 * 2 * 16 * 64 + 3 * 64 * 96) + 100 * 64


@pytest.mark.parametrize("config", [GPT2Config, T5Config, MambaConfig, GPTNeoConfig])
def test_a_model_that_is_no_dense_decoder_is_refused_by_its_type(tmp_path, config):
    """Fails when a size that its config.json lacks is asked for without care."""
    config().save_pretrained(tmp_path)
    expected = rf"model\.path={re.escape(str(tmp_path))}: model_type {config.model_type} is not"
    with pytest.raises(PreflightError, match=expected):
        model_facts(str(tmp_path))


@pytest.mark.parametrize("key", ["engine.max_model_len", "data.max_prompt_tokens + more"])
def test_the_setting_that_makes_the_window_too_large_is_named(tmp_path, key):
    """Fails when another setting is blamed; one token less is no more than the model reads."""
    path = small_qwen3(tmp_path)
    expected = f"window: {re.escape(key)} = 513, the model reads 512 tokens"
    with pytest.raises(PreflightError, match=expected):
        start(path, window_tokens=513, window_key=key)
    assert start(path, window_tokens=512, window_key=key).window_tokens == 512


@pytest.mark.parametrize(("reference_bytes", "bytes_each"), [(0, 18), (2, 20), (4, 22)])
def test_a_frozen_reference_counts_as_memory(reference_bytes, bytes_each):
    """Fails when a run with a second model starts where only one fits."""
    size = {"window_tokens": 1, "window_key": "", "reference_bytes": reference_bytes}
    expected = f"train in about {90_000e9 * bytes_each / 2**30:.0f} GiB"
    with pytest.raises(PreflightError, match=expected):
        start("no_such/Model-90000B", **size)
