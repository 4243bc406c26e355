"""Facts of the model that are read before anything is started."""

from __future__ import annotations

import re

import pytest
from transformers import MambaConfig, Qwen3Config, T5Config

from april_rl.runtime.preflight import PreflightError, check_start, model_facts, num_gpus


def start(path, *, window_tokens, window_key, tensor_parallel_size=1):
    return check_start(
        model_path=str(path),
        device="cpu",
        num_workers=1,
        is_cluster=False,
        tensor_parallel_size=tensor_parallel_size,
        window_tokens=window_tokens,
        window_key=window_key,
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


def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path):
    """Fails when a mistyped export is looked for on the hub."""
    (tmp_path / "step_6").mkdir()
    with pytest.raises(PreflightError, match=r"step_7 does not exist; .* has step_6"):
        model_facts(str(tmp_path / "step_7"))
    missing = tmp_path / "no" / "such"
    with pytest.raises(
        PreflightError, match=f"^model.path={re.escape(str(missing))} does not exist$"
    ):
        model_facts(str(missing))


def test_the_directory_of_a_run_is_no_model_and_its_last_export_is_named(tmp_path):
    """Fails when a library says that it lacks a key."""
    (tmp_path / "exports" / "step_2").mkdir(parents=True)
    with pytest.raises(PreflightError, match=r"is a run directory: give an export, .*/step_2$"):
        model_facts(str(tmp_path))


@pytest.mark.parametrize("config", [T5Config, MambaConfig])
def test_an_unsupported_model_type_is_refused_by_name(tmp_path, config):
    """Fails when a size that its config.json lacks is asked for without care."""
    config().save_pretrained(tmp_path)
    expected = rf"model\.path={re.escape(str(tmp_path))}: model_type {config.model_type} is not"
    with pytest.raises(PreflightError, match=expected):
        model_facts(str(tmp_path))


@pytest.mark.parametrize("key", ["engine.max_model_len", "data.max_prompt_tokens + more"])
def test_the_setting_that_makes_the_context_too_long_is_named(tmp_path, key):
    """Fails when another setting is blamed; one token less is no more than the model reads."""
    path = small_qwen3(tmp_path)
    expected = f"context length: {re.escape(key)} = 513 exceeds the model's maximum, 512"
    with pytest.raises(PreflightError, match=expected):
        start(path, window_tokens=513, window_key=key)
    assert start(path, window_tokens=512, window_key=key).window_tokens == 512


def test_a_tensor_parallel_size_that_does_not_divide_the_heads_is_refused(tmp_path):
    """Four heads. Fails when vLLM is left to find it in every worker."""
    path, size = small_qwen3(tmp_path), {"window_tokens": 1, "window_key": ""}
    assert start(path, **size, tensor_parallel_size=4).num_heads == 4
    expected = r"heads: engine\.tensor_parallel_size=3 does not divide the model's 4 attention"
    with pytest.raises(PreflightError, match=expected):
        start(path, **size, tensor_parallel_size=3)


def test_gpus_are_counted_from_device_files(tmp_path, monkeypatch):
    """Fails when the control files of NVIDIA's driver count, or processors among AMD's nodes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    devices, nodes = tmp_path / "dev", tmp_path / "nodes"
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).mkdir(parents=True)
    for number, gpu_id in enumerate(("0", "0", "51140", "9054", "20001")):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert num_gpus(devices=devices, nodes=tmp_path / "none") == 2
    assert num_gpus(devices=tmp_path / "none", nodes=nodes) == 3
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert num_gpus(devices=tmp_path / "none", nodes=nodes) == 1
