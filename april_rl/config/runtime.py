"""Settings of processes: how many workers there are, where, and when one counts as hung."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from april_rl.config.checks import check_bounds, require, within
from april_rl.config.choices import Device

_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")


@dataclass(slots=True, kw_only=True)
class RuntimeConfig:
    """Processes and devices."""

    # a worker has one GPU (or one CPU slot), a learner shard, and an engine or a share of one
    # (engine.tensor_parallel_size); auto: one worker per GPU, or on CPU enough for one engine
    num_workers: int | str = within(">= 1 or auto", "auto")
    # false: one worker, in the process that was started, for a debugger or a notebook
    ray: bool = True
    # host:port of a running cluster; auto: the cluster that this machine has joined; null: start
    # Ray on this machine alone
    ray_address: str | None = None
    device: Device = Device.auto
    # threads of each worker; auto: cores of the machine / its workers, at most 16 with a GPU
    threads: int | str = within(">= 1 or auto", "auto")
    # seconds without progress (tick, micro-batch, tensor) after which a worker counts as hung; six
    # times as long in calls that report no progress: starting model and engine, a checkpoint
    stall_timeout_s: float = within("> 0", 600.0)
    # times that a run restarts from its last checkpoint by itself after a worker has died or hung
    max_restarts: int = within(">= 0", 3)

    def __post_init__(self) -> None:
        check_bounds("runtime", self)
        address = self.ray_address
        require(
            self.ray or (address is None and self.num_workers in (1, "auto")),
            "runtime.ray=false runs one worker in the process that was started: set "
            "runtime.num_workers=1 and runtime.ray_address=null",
        )
        require(
            address in (None, "auto") or _HOST_AND_PORT.fullmatch(str(address)) is not None,
            f"runtime.ray_address must be host:port, auto or null, got {address}",
        )


@dataclass(slots=True, kw_only=True)
class UserCodeConfig:
    """Limits of each process that runs rewards or environments."""

    # time for a process to start and load its functions; a large reward model needs more
    start_timeout_s: float = within("> 0", 60.0)
    memory_gib: float = within(">= 1", 4.0)  # limit of a process, and of each program it starts
    # environment variables that rewards and environments may read although their names mark them as
    # secret (TOKEN, KEY, SECRET, PASSWORD, ...), in addition to the ones that `api_key_env` names
    secrets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_bounds("user_code", self)
