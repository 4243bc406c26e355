"""Sends weights or adapters from a worker's learner to its engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from april_rl.run.supervision.heartbeat import Heartbeat

if TYPE_CHECKING:
    from torch import Tensor

    from april_rl.training.engine.port import Engine
    from april_rl.training.learner.learner import Learner


def send_weights(
    learner: Learner, engine: Engine, beat: Heartbeat, *, version: int, merged: bool = True
) -> int:
    """Load the weights into the engine, adapters merged or left out; return their bytes."""
    num_bytes = 0

    def count_weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_bytes
        for name, tensor in learner.weights(merged=merged):
            beat.beat()
            num_bytes += tensor.nbytes
            yield name, tensor

    engine.load_weights(count_weights(), policy_version=version)
    return num_bytes


def send_adapter(learner: Learner, engine: Engine, beat: Heartbeat, *, version: int) -> int:
    """Load the adapters, and first the frozen weights if the engine lost them while it slept;
    return the bytes.
    """
    num_bytes = 0
    if not engine.keeps_weights:
        num_bytes += send_weights(learner, engine, beat, version=version, merged=False)
    with TemporaryDirectory(prefix="april_rl_adapter_") as folder:
        num_bytes += learner.write_adapter(Path(folder))
        engine.load_adapter(Path(folder), policy_version=version)
    return num_bytes
