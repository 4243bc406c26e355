"""Find the machine, and build the workers from a checked configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import has_chat
from april_rl.run.supervision.watchdog import Watchdog
from april_rl.start.planning.machine import Machine, this_machine
from april_rl.start.planning.sizes import Sizes
from april_rl.task.data.stop_tokens import stop_token_ids
from april_rl.training.runtime.cluster import cluster_gpus
from april_rl.training.runtime.layout import Layout
from april_rl.training.runtime.worker_parts import WorkerSettings
from april_rl.training.runtime.workers import LocalWorker, RayWorkers, Workers


def machine_of(config: TrainConfig) -> Machine:
    """Return this machine or the cluster at runtime.ray_address; raise RunError without a reply."""
    machine, address = this_machine(), config.runtime.ray_address
    if address is None:
        return machine
    return replace(machine, name="the Ray cluster", is_cluster=True, num_gpus=cluster_gpus(address))


def build_workers(config: TrainConfig, layout: Layout, *, run_dir: Path, sizes: Sizes) -> Workers:
    """Return Ray's workers with their watchdog; with runtime.ray=false one in this process."""
    is_chat = has_chat(config.data, config.evaluation.sets)
    threads = config.runtime.threads
    assert not isinstance(threads, str), "runtime.threads=auto is not decided"
    settings = WorkerSettings(
        config=config,
        device=layout.device,
        threads=threads,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        stop_tokens=tuple(stop_token_ids(config.model.path, is_chat=is_chat)),
    )
    if not config.runtime.ray:
        return LocalWorker(layout, settings=settings)
    watchdog = Watchdog(
        report=run_dir.resolve() / "stall_report.txt",
        stall_timeout_s=config.runtime.stall_timeout_s,
        call_timeout_s=6 * config.runtime.stall_timeout_s,
    )
    return RayWorkers(
        layout,
        settings=settings,
        address=config.runtime.ray_address,
        watchdog=watchdog,
        batch_tokens=sizes.batch_tokens,
    )
