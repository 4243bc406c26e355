"""How many workers a run has, on what device, and which of them are one engine: settled once,
before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from april_rl.config import TrainConfig
from april_rl.config.choices import Device, Offload
from april_rl.config.schema import LearnerConfig
from april_rl.errors import RunError
from april_rl.runtime.cluster import cluster_gpus
from april_rl.runtime.preflight import num_gpus, pick_device


class LayoutError(RunError):
    """The settings ask for workers that cannot be had or do not go with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who runs where. Consecutive ranks are one engine: rank r belongs to engine r // size."""

    device: str  # cpu or cuda (ROCm's torch calls its devices cuda too)
    num_workers: int
    tensor_parallel_size: int  # workers of one engine

    def __post_init__(self) -> None:
        assert self.num_workers % self.tensor_parallel_size == 0, self

    @property
    def num_engines(self) -> int:
        """Engines that sample independently of each other."""
        return self.num_workers // self.tensor_parallel_size

    def shown_in(self, plain: Mapping[str, object]) -> dict[str, object]:
        """The configuration as a run shows it, with the number of workers that it has."""
        section = plain.get("runtime")
        runtime = section if isinstance(section, Mapping) else {}
        return {**plain, "runtime": {**runtime, "num_workers": self.num_workers}}

    def __str__(self) -> str:
        """For the person who watches."""
        each = f" of {self.tensor_parallel_size} workers" if self.tensor_parallel_size > 1 else ""
        engines = f"{self.num_engines} engine{'s' if self.num_engines > 1 else ''}{each}"
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        return f"{workers} on {self.device}, {engines}"


def settled(config: TrainConfig) -> tuple[TrainConfig, Layout]:
    """`settle` for this machine, or for the Ray cluster of runtime.ray_address, which is joined.

    Raises LayoutError naming the keys, and RunError when no cluster answers.
    """
    address = config.runtime.ray_address
    if address is None:
        return settle(config, gpus=num_gpus(), where="this machine")
    gpus, where = cluster_gpus(address), "the Ray cluster"
    config, layout = settle(config, gpus=gpus, where=where)
    if layout.device == "cuda" and gpus < layout.num_workers:
        raise LayoutError(
            f"runtime.num_workers={layout.num_workers} wants as many GPUs, {where} has {gpus}"
        )
    return config, layout


def settle(config: TrainConfig, *, gpus: int, where: str) -> tuple[TrainConfig, Layout]:
    """Return `config` as it runs where there are `gpus` GPUs, and the layout; `where` is for
    messages.

    num_workers=auto: one for every GPU; without GPUs those of one engine. On CPU nothing is
    offloaded: the host's memory is the learner's own. Raises LayoutError naming the keys when the
    workers make no engines.
    """
    runtime, together = config.runtime, config.engine.tensor_parallel_size
    device = pick_device(runtime.device.name, gpus=gpus)
    workers = runtime.num_workers
    if isinstance(workers, str):
        workers = gpus if device == "cuda" else together
    name = Device.gpu if device == "cuda" else Device.cpu
    try:
        found = replace(
            config,
            runtime=replace(runtime, num_workers=workers, device=name),
            learner=config.learner if device == "cuda" else _on_cpu(config.learner),
        )
    except ValueError as error:
        raise LayoutError(
            f"runtime.num_workers={runtime.num_workers}, and {where} has {gpus} GPUs: {error}"
        ) from error
    layout = Layout(device=device, num_workers=workers, tensor_parallel_size=together)
    return found, layout


def _on_cpu(learner: LearnerConfig) -> LearnerConfig:
    return replace(learner, offload=Offload.none)
