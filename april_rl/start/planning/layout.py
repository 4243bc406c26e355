"""Decides the number and the device of the workers once, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from april_rl.config import TrainConfig
from april_rl.config.choices import ComputeDtype, Device, Offload
from april_rl.config.consistency import check_layout
from april_rl.config.engine import EngineConfig
from april_rl.config.schema import LearnerConfig
from april_rl.errors import LayoutError
from april_rl.start.planning.machine import Machine, num_gpus
from april_rl.training.runtime.layout import Layout

_MOST_GPU_THREADS = 16  # threads of a worker; more do not make a copy faster


def unused_gpus(layout: Layout, *, gpus: int, where: str) -> Iterator[str]:
    """Yield a line when the workers leave some of the `gpus` GPUs unused."""
    if layout.device == "cuda" and layout.num_workers < gpus:
        used = layout.num_workers
        yield f"runtime.num_workers={used} uses {used} of the {gpus} GPUs of {where}"


def worker_threads(layout: Layout, machine: Machine) -> int:
    """Return a worker's share of the cores; beside a GPU, threads copy tensors and load models."""
    workers = layout.num_workers
    if layout.device == "cpu":
        return max(1, machine.num_cores // workers)
    on_one_machine = min(workers, machine.num_local_gpus or workers)
    return min(_MOST_GPU_THREADS, max(1, machine.num_cores // on_one_machine))


def pick_device(wanted: str, *, gpus: int | None = None) -> str:
    """Return cpu or cuda (also for ROCm) for runtime.device; auto takes a GPU if there is one."""
    if wanted == "auto":
        return "cuda" if (num_gpus() if gpus is None else gpus) else "cpu"
    return "cpu" if wanted == "cpu" else "cuda"


def settle(config: TrainConfig, *, gpus: int, where: str) -> tuple[TrainConfig, Layout]:
    """Replace auto in `config`, given `gpus` GPUs; return the configuration and its layout. `where`
    names the machine in messages.

    num_workers=auto is one worker per GPU, or one engine on CPU. On CPU nothing is offloaded, since
    the learner uses the host's memory anyway, and with auto nothing is recomputed. rollout.resume
    stays auto where the memory plan has to decide. Raise LayoutError naming the keys when the
    workers do not form whole engines.
    """
    runtime, together = config.runtime, config.engine.tensor_parallel_size
    device = pick_device(runtime.device.name, gpus=gpus)
    workers = runtime.num_workers
    if isinstance(workers, str):
        if device == "cuda" and not gpus:
            raise LayoutError(
                f"runtime.device={runtime.device.name} needs a GPU, and {where} has none that "
                "processes may use: set runtime.device=cpu, or start the run where there are GPUs "
                "(docs/gpu.md)"
            )
        workers = gpus if device == "cuda" else together
        if not runtime.ray:
            workers = 1
    name = Device.gpu if device == "cuda" else Device.cpu
    found = replace(
        config,
        runtime=replace(runtime, num_workers=workers, device=name),
        learner=_learner(config.learner, device),
        engine=_engine(config.engine, device),
    )
    try:
        check_layout(found)
    except ValueError as error:
        raise LayoutError(
            f"runtime.num_workers={runtime.num_workers}; {where} has {gpus} GPUs: {error}"
        ) from error
    layout = Layout(device=device, num_workers=workers, tensor_parallel_size=together)
    return found, layout


def precision(asked: ComputeDtype, device: str) -> ComputeDtype:
    """Return what a precision setting means on `device`, cpu or cuda. On a CPU auto is float32 with
    any instruction set: nothing computes it more slowly (docs/experiments.md), and a run is the
    same everywhere.
    """
    if asked is not ComputeDtype.auto:
        return asked
    return ComputeDtype.bfloat16 if device == "cuda" else ComputeDtype.float32


def auto_choices(requested: TrainConfig, config: TrainConfig) -> Iterator[str]:
    """Yield a line with the reason for each auto that `settle` replaced."""
    is_on_cpu = config.runtime.device is Device.cpu
    asked = {
        "learner.compute_dtype": (requested.learner.compute_dtype, config.learner.compute_dtype),
        "engine.dtype": (requested.engine.dtype, config.engine.dtype),
    }
    reason = ", on a CPU as fast as bfloat16 or many times faster"
    for dtype in (ComputeDtype.float32, ComputeDtype.bfloat16):
        keys = [k for k, (before, after) in asked.items() if before != after and after is dtype]
        if keys:
            yield f"{' and '.join(keys)}: {dtype.value}{reason if is_on_cpu else ''}"


def _engine(engine: EngineConfig, device: str) -> EngineConfig:
    """Return the engine's settings on a device; on CPU none has a share of a GPU."""
    share = (EngineConfig() if device == "cpu" else engine).gpu_memory_utilization
    return replace(
        engine,
        dtype=precision(engine.dtype, device),
        gpu_memory_utilization=share,
        args={"async_scheduling": device == "cuda" and not engine.guesses, **engine.args},
    )


def _learner(learner: LearnerConfig, device: str) -> LearnerConfig:
    recomputes = learner.activation_checkpointing
    if isinstance(recomputes, str) and device == "cpu":
        recomputes = False
    return replace(
        learner,
        activation_checkpointing=recomputes,
        compute_dtype=precision(learner.compute_dtype, device),
        fused=device == "cuda" if isinstance(learner.fused, str) else learner.fused,
        flash_attention_4=learner.flash_attention_4 and device == "cuda",
        offload=learner.offload if device == "cuda" else Offload.none,
    )
