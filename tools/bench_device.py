"""The device of a benchmark: its name, its peak FLOP/s, and a clock that waits for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

# Dense bfloat16 in TFLOP/s, by the makers' data sheets; the first name found in that of the device
# counts. NVIDIA's sheets of Hopper and later print twice as much, "with sparsity".
PEAK_TFLOPS = {
    "B200": 2250.0,  # NVIDIA DGX B200 datasheet
    "H200 NVL": 835.5,  # NVIDIA H200 datasheet
    "H200": 989.5,  # the same, SXM; GH200 too
    "H100 NVL": 835.5,  # NVIDIA H100 datasheet
    "H100 PCIe": 756.5,  # the same, of 2023
    "H100": 989.5,  # the same, SXM
    "A100": 312.0,  # NVIDIA A100 datasheet
    "L40S": 362.0,  # NVIDIA L40S datasheet
    "RTX 4090": 165.2,  # NVIDIA Ada architecture whitepaper, appendix A
    "MI300X": 1307.4,  # AMD Instinct MI300X data sheet
}
_COPIED_BYTES = {"cpu": 2**28, "accelerator": 2**31}
FROM_DATA_SHEET = "data sheet"
_GEMM_SIZE = 2048  # of the matrix product that is timed when the peak is unknown


def pick_device(wanted: str) -> torch.device:
    """Return the device that --device names; `auto` is the accelerator if there is one."""
    found = torch.accelerator.current_accelerator()
    if wanted == "cpu" or (wanted == "auto" and found is None):
        return torch.device("cpu")
    if found is None or (wanted != "auto" and found.type != wanted):
        sys.exit(f"--device {wanted}: torch finds no such device; --device cpu runs without")
    return found


def name_of(device: torch.device) -> str:
    """Return the name that the device reports."""
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    name: str = torch.get_device_module(device).get_device_name()
    return name


def peak_tflops(device: torch.device, given: float | None) -> tuple[float, str]:
    """Return TFLOP/s in bfloat16 and the source of the number."""
    if given is not None:
        return given, "as given"
    sheet = None if device.type == "cpu" else sheet_tflops(name_of(device))
    if sheet is not None:
        return sheet, FROM_DATA_SHEET
    size = _GEMM_SIZE
    return product_tflops(device, size), f"a product of {size}² matrices, measured"


def sheet_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of the data sheet; None for a device that is not listed."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def product_tflops(device: torch.device, size: int) -> float:
    """Return TFLOP/s of a product of two bfloat16 matrices [size, size], the best of ten."""
    matrix = torch.randn(size, size).to(device, torch.bfloat16)
    seconds = min(timed(lambda: matrix @ matrix, device) for _ in range(10))
    return 2 * size**3 / seconds / 1e12


def copy_bandwidth(device: torch.device) -> float:
    """Return GB/s (1e9 bytes, read and written ones) of a copy within the device's memory, the best
    of ten.
    """
    kind = "cpu" if device.type == "cpu" else "accelerator"
    source = torch.zeros(_COPIED_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * source.nbytes / seconds / 1e9


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has finished the work of `step`."""
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - started
