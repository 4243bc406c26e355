"""The learner is built with the settings that the memory plan has chosen."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from composed_config import load

from april_rl.config import TrainConfig
from april_rl.config.schema import LearnerConfig
from april_rl.start.planning.plan import Plan
from april_rl.start.planning.sizes import Sizes
from april_rl.training.runtime import worker as worker_module
from april_rl.training.runtime.layout import Layout
from april_rl.training.runtime.worker_parts import WorkerSettings
from april_rl.training.runtime.workers import LocalWorker, RayWorkers

LAYOUT = Layout(device="cpu", num_workers=1, tensor_parallel_size=1)


def settings(config: TrainConfig) -> WorkerSettings:
    return WorkerSettings(
        config=config, device="cpu", threads=1, max_model_len=8, max_num_seqs=1, stop_tokens=()
    )


def nothing(*_: Any, **__: Any) -> None:
    """Replace a part of the start that the test does not need."""


@pytest.fixture
def planned() -> Plan:
    """Return a plan with a chosen share; the settings from before it still say auto."""
    config = load("+recipe=tiny_cpu", "rollout.resume=keep")
    learner = replace(config.learner, activation_checkpointing=0.5, fused=False)
    return Plan(config=replace(config, learner=learner), layout=LAYOUT, sizes=Sizes(1, 1, 8))


def test_the_learner_in_one_process_gets_the_planned_settings(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the worker uses the settings from before the plan."""
    built: list[LearnerConfig] = []

    def build(config: Any, **_: Any) -> tuple[SimpleNamespace, Any]:
        built.append(config.learner)
        return SimpleNamespace(offload=nothing), nothing

    monkeypatch.setattr(worker_module, "build_learner", build)
    undecided = load("+recipe=tiny_cpu", "learner.activation_checkpointing=auto")
    worker = LocalWorker(LAYOUT, settings=settings(undecided))
    monkeypatch.setattr(worker, "_join", nothing)
    monkeypatch.setattr(worker.worker, "build_engine", nothing)
    worker.start(planned.config, sleeps=planned.engines_sleep, on_stage=nothing)
    assert built == [planned.config.learner]


def test_one_process_on_a_gpu_has_the_allocator_settings_of_a_worker(monkeypatch) -> None:
    """Fails when only Ray's workers have them: then offloading takes twice the host memory."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    LocalWorker(replace(LAYOUT, device="cuda"), settings=settings(TrainConfig()))
    assert "pinned_max_round_threshold_mb:1" in os.environ["PYTORCH_ALLOC_CONF"]


def test_the_learner_on_ray_gets_the_planned_settings(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the actors do not get the settings of the plan."""
    workers = RayWorkers.__new__(RayWorkers)
    sent: list[tuple[object, ...]] = []
    monkeypatch.setattr(workers, "_all", lambda *call, **_: sent.append(call))
    monkeypatch.setattr(workers, "_join", nothing)
    workers.start(planned.config, sleeps=planned.engines_sleep, on_stage=nothing)
    assert sent[0] == ("build_learner", planned.config.learner)
