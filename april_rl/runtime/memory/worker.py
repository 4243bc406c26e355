"""What memory there is where a worker runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What a worker found before it loaded anything; bytes."""

    node_id: str
    device_bytes: int  # of its GPU, all of it; on CPU 0
    free_bytes: int  # of these; on CPU 0
    host_free_bytes: int  # of its node, which it shares with the node's other workers
