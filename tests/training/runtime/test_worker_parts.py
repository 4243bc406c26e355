"""The parts of a worker: its engine and its process group."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composed_config import load
from torch.distributed import distributed_c10d

from april_rl.config import TrainConfig
from april_rl.training.engine import vllm_engine
from april_rl.training.runtime.worker import Worker
from april_rl.training.runtime.worker_parts import WorkerSettings

SETTINGS = WorkerSettings(
    config=TrainConfig(),
    device="cpu",
    threads=1,
    max_model_len=16,
    max_num_seqs=2,
    stop_tokens=(1,),
)


def record(calls: list[dict[str, Any]]) -> Callable[..., None]:
    """Return a constructor that records its arguments, the section as `config`."""
    return lambda config, **keywords: calls.append({"config": config, **keywords})


ADAPTER_ALONE = ("lora.rank=4", "lora.sync=adapter")


@pytest.mark.parametrize("lora", [(), ADAPTER_ALONE, ("lora.rank=4",)])
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("keeps_parked", [False, True])
def test_a_workers_engine_gets_the_settings_and_the_planned_values(
    monkeypatch, sleeps, keeps_parked, lora
):
    """Fails when a setting, or a choice of the memory plan, does not reach vLLM."""
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(vllm_engine, "VllmEngine", record(built))
    overrides = ("rollout.temperature=0.6", "seed=7")
    config = load("+recipe=tiny_cpu", "model.path=some/model", *overrides, *lora)
    worker = Worker(replace(SETTINGS, config=config, max_model_len=300, max_num_seqs=5))
    planned = replace(config.engine, gpu_memory_utilization=0.3)
    worker.build_engine(planned, sleeps=sleeps, keeps_parked=keeps_parked)
    [found] = built
    assert found == {
        "config": planned,
        "model_path": "some/model",
        "seed": 7,
        "temperature": 0.6,
        "max_model_len": 300,
        "max_num_seqs": 5,
        "reports_experts": False,
        "keeps_parked": keeps_parked,  # the engine drops kept samples when it sleeps
        "sleeps": sleeps,
        "stop_tokens": (1,),
        "lora": config.lora if lora is ADAPTER_ALONE else None,
    }


def test_no_collective_times_out_before_the_watchdog(monkeypatch):
    """For the process group of all ranks and for one that is made later. Fails when torch's own
    limit of half an hour ends a worker that waits for a slow one.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(os, "environ", {**os.environ})
    worker = Worker(replace(SETTINGS, threads=0))
    worker.join(worker.listen(1), rank=0, world_size=1, timeout_s=7200.0)
    for group in (dist.group.WORLD, dist.new_group([0])):
        limit = group._get_backend(torch.device("cpu")).options._timeout
        assert limit.total_seconds() == 7200
