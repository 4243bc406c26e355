"""Facts about the model that are read before anything is started."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from composed_config import load
from source_tree import ROOT
from transformers import MambaConfig, Qwen3Config, T5Config

from april_rl.errors import PreflightError
from april_rl.start.planning.facts import read_facts
from april_rl.start.planning.machine import num_gpus, this_machine, wrong_tools
from april_rl.start.planning.model import read_model
from april_rl.start.planning.plan import draft_training

HERE = this_machine()


def start(path, *overrides: str):
    config = load("+recipe=tiny_cpu", f"model.path={path}", *overrides)
    machine = replace(HERE, num_cores=8, num_gpus=0)
    return draft_training(config, read_facts(config, machine, trains=True)).facts.policy


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


def test_a_missing_folder_is_reported_as_missing(tmp_path):
    """Fails when a mistyped export is searched on the hub."""
    (tmp_path / "step_6").mkdir()
    with pytest.raises(PreflightError, match=r"step_7 does not exist; .* has step_6"):
        read_model(str(tmp_path / "step_7"))
    missing = tmp_path / "no" / "such"
    with pytest.raises(
        PreflightError, match=f"^model.path={re.escape(str(missing))} does not exist$"
    ):
        read_model(str(missing))


def test_a_run_directory_given_as_model_is_refused_and_its_last_export_is_named(tmp_path):
    """Fails when the user sees a library's error about a missing key, or is offered an export that
    was written later but is of an earlier step.
    """
    for step in (10, 9):
        (tmp_path / "exports" / f"step_{step}").mkdir(parents=True)
    os.utime(tmp_path / "exports" / "step_10", times=(0, 0))
    with pytest.raises(PreflightError, match=r"is a run directory: give an export, .*/step_10$"):
        read_model(str(tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step_9"
    checkpoint.mkdir(parents=True)
    with pytest.raises(PreflightError, match=r"step_9 is a checkpoint: give an export, .*/step_10"):
        read_model(str(checkpoint))


@pytest.mark.parametrize("config", [T5Config, MambaConfig])
def test_an_unsupported_model_type_is_refused_by_name(tmp_path, config):
    """Fails when a size that its config.json lacks is read without a check."""
    config().save_pretrained(tmp_path)
    expected = rf"model\.path={re.escape(str(tmp_path))}: model_type {config.model_type} is not"
    with pytest.raises(PreflightError, match=expected):
        read_model(str(tmp_path))


def test_the_setting_that_makes_the_context_too_long_is_named(tmp_path):
    """Fails when another setting is blamed; with one token less, the model's context is long
    enough.
    """
    path = small_qwen3(tmp_path)
    expected = r"context length: engine\.max_model_len = 513 exceeds the model's maximum, 512"
    with pytest.raises(PreflightError, match=expected):
        start(path, "engine.max_model_len=513")
    longer = ("data.max_prompt_tokens=13", "rollout.max_response_tokens=500")
    key = "data.max_prompt_tokens + rollout.max_response_tokens"
    with pytest.raises(PreflightError, match=rf"context length: {re.escape(key)} = 513 exceeds"):
        start(path, *longer)
    assert start(path, "engine.max_model_len=512").context_tokens == 512


def test_a_tensor_parallel_size_that_does_not_divide_the_heads_is_refused(tmp_path):
    """The model has four heads. Fails when only vLLM finds it, in every worker."""
    path = small_qwen3(tmp_path)
    assert start(path, "engine.tensor_parallel_size=4", "runtime.num_workers=4")
    expected = r"heads: engine\.tensor_parallel_size=3 does not divide the model's 4 attention"
    with pytest.raises(PreflightError, match=expected):
        start(path, "engine.tensor_parallel_size=3", "runtime.num_workers=3")


def test_an_option_that_vllm_does_not_know_is_refused_by_name(tmp_path):
    with pytest.raises(PreflightError, match=r"engine\.args\.swap: the installed vLLM has no such"):
        start(small_qwen3(tmp_path), "engine.args.swap=1", "engine.args.max_logprobs=3")


def test_without_the_hub_the_message_says_what_to_give(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PreflightError, match="HF_HUB_OFFLINE is set: give a local folder"):
        read_model("owner/no-such-model")


def test_gpus_are_counted_from_device_files(tmp_path, monkeypatch):
    """Fails when the control files of NVIDIA's driver count, or CPUs among AMD's nodes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    devices, nodes = tmp_path / "dev", tmp_path / "nodes"
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).mkdir(parents=True)
    for number, gpu_id in enumerate(("0", "0", "51140", "9054", "20001")):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert num_gpus(devices=devices, nodes=tmp_path / "none") == 2
    assert num_gpus(devices=tmp_path / "none", nodes=nodes) == 3
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    assert num_gpus(devices=tmp_path / "none", nodes=nodes) == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert num_gpus(devices=tmp_path / "none", nodes=nodes) == 1


def write_nvidia_smi(folder: Path, said: str) -> None:
    """Write a program that prints `said`, as the first on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_gpus_of_wsl2_are_counted_by_nvidia_smi(tmp_path, monkeypatch):
    """It has /dev/dxg in place of a device file for each GPU."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    write_nvidia_smi(tmp_path / "bin", "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert num_gpus(devices=tmp_path / "dev", nodes=tmp_path / "none") == 1


def test_what_a_gpu_run_needs_to_compile_is_looked_at_before_it_starts(tmp_path, monkeypatch):
    """Fails when a run downloads a model, and then ends in Triton's own words."""
    (tmp_path / "Python.h").touch()
    assert wrong_tools(include=tmp_path, nvidia_version="580.65.06\n") == []
    [old] = wrong_tools(include=tmp_path, nvidia_version="550.54.15\n550.54.15\n")
    assert old.startswith("driver: NVIDIA's driver 550.54.15 is older than 580")
    [headers] = wrong_tools(include=tmp_path / "none", nvidia_version="")
    assert "python3-dev" in headers
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    [compiler] = wrong_tools(include=tmp_path, nvidia_version="")
    assert "install gcc" in compiler


def test_setup_refuses_an_old_driver_before_it_downloads(tmp_path):
    write_nvidia_smi(tmp_path / "bin", "550.54.15")
    path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
    command = [
        "bash",
        str(ROOT / "tools" / "setup.sh"),
        sys.executable,
        "cuda",
        str(tmp_path / "v"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 1
    assert "driver 550.54.15 is older than 580" in done.stderr
    assert not (tmp_path / "v").exists()
