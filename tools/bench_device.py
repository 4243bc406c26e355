"""The device a benchmark runs on: its name, its peak, and a clock that waits for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

# Dense bfloat16, in TFLOP/s, as the makers say; the first name found in that of the device counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
}
_GEMM_SIZE = 2048  # of the product that is timed where the peak is not known


def pick_device(wanted: str) -> torch.device:
    """The accelerator for `auto` where there is one."""
    found = torch.accelerator.current_accelerator()
    if wanted == "cpu" or (wanted == "auto" and found is None):
        return torch.device("cpu")
    if found is None or (wanted != "auto" and found.type != wanted):
        sys.exit(f"--device {wanted}: torch finds no such device; --device cpu runs without")
    return found


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    name: str = torch.get_device_module(device).get_device_name()
    return name


def peak_tflops(device: torch.device, given: float | None) -> tuple[float, str]:
    """TFLOP/s in bfloat16 and where the number comes from."""
    if given is not None:
        return given, "as given"
    for name, peak in PEAK_TFLOPS.items():
        if device.type != "cpu" and name in name_of(device):
            return peak, "as the maker says"
    matrix = torch.randn(_GEMM_SIZE, _GEMM_SIZE).to(device, torch.bfloat16)
    seconds = min(timed(lambda: matrix @ matrix, device) for _ in range(10))
    return 2 * _GEMM_SIZE**3 / seconds / 1e12, f"a product of {_GEMM_SIZE}² matrices, measured"


def wait(device: torch.device) -> None:
    """Return when what was asked of `device` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds until what `step` asked the device for is done."""
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - started
