"""Ray: embedded on this machine or a running cluster, and where on it the workers are placed."""

from __future__ import annotations

import logging
import os
from functools import partial

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group

from april_rl.errors import RunError

_MIB = 1 << 20
# Batches and completions pass through the object store; weights never do.
_OBJECT_STORE_BYTES = 256 * _MIB
_PLACEMENT_TIMEOUT_S = 120.0


def start_ray(*, num_workers: int, address: str | None) -> None:
    """Join the cluster at `address`, or start Ray embedded here: offline, no dashboard."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray hides GPUs from actors that ask for none; the controller must not do more than that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    connect = partial(
        ray.init, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True
    )
    if address is not None:
        try:
            connect(address=address)
        except (RayError, ConnectionError, RuntimeError) as error:
            raise RunError(
                f"runtime.ray_address={address}: no Ray cluster answers ({error})"
            ) from error
        return
    connect(
        address="local",  # otherwise Ray would follow RAY_ADDRESS, and refuse the rest
        num_cpus=max(num_workers, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


def place(num_workers: int, *, use_gpu: bool) -> PlacementGroup:
    """A bundle a worker, on as few nodes as they fit on."""
    bundle = {"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0}
    group: PlacementGroup = placement_group([bundle] * num_workers, strategy="PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        have = ray.cluster_resources()  # type: ignore[no-untyped-call]
        raise RunError(
            f"runtime.num_workers={num_workers} wants {num_workers} times {bundle}, the "
            f"Ray cluster has { {k: have.get(k, 0.0) for k in bundle} }"
        )
    return group
