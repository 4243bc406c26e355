"""Memory that a run uses, as metrics of a step."""

from __future__ import annotations

import psutil

from april_rl.metrics import Max, Metrics
from april_rl.run.supervision.host_memory import host_memory


def controller_memory() -> Metrics:
    return Metrics({"memory/controller_rss_bytes": Max(psutil.Process().memory_info().rss)})


def worker_memory(*, device: str) -> Metrics:
    """Return memory/* of this worker and its machine: over all workers, the largest.

    On a GPU, call it while the engine is awake. `gpu_peak_bytes` is the most that torch has held
    since the last call; `gpu_used_frac` is the share of the GPU that all processes use now.
    """
    host = host_memory()
    found = {
        "memory/worker_rss_bytes": Max(psutil.Process().memory_info().rss),
        "memory/host_used_frac": Max(1 - host.free / host.total),
    }
    if device != "cpu":
        import torch

        free, total = torch.accelerator.get_memory_info()
        found["memory/gpu_used_frac"] = Max(1 - free / total)
        found["memory/gpu_peak_bytes"] = Max(torch.accelerator.max_memory_allocated())
        torch.accelerator.reset_peak_memory_stats()
    return Metrics(found)
