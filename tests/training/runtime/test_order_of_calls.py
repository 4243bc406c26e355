"""Learner and engine never need the GPU's memory at the same time, from the start to a resume."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_worker_parts import SETTINGS

from april_rl.config import TrainConfig
from april_rl.config.choices import LoraSync
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.config.schema import LearnerConfig
from april_rl.metrics import Metrics
from april_rl.training.rollout.requests import Requests
from april_rl.training.runtime import worker as worker_module
from april_rl.training.runtime.worker import Worker


class Gpu:
    """A device with room for the learner or for the engine's KV cache."""

    def __init__(self) -> None:
        self.has_learner = self.has_cache = False

    def check(self) -> None:
        assert not (self.has_learner and self.has_cache), "out of memory"


class StandInLearner:
    """A learner that is on the device from each call until `offload`."""

    def __init__(self, gpu: Gpu, *, merged: bool) -> None:
        self.gpu, self.merged = gpu, merged
        self.load()

    def load(self) -> None:
        self.gpu.has_learner = True
        self.gpu.check()

    def offload(self) -> None:
        self.gpu.has_learner = False

    def update(self, _: object) -> Metrics:
        self.load()
        return Metrics()

    def weights(self, *, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
        assert merged is self.merged
        self.load()
        yield from (("embedding", torch.zeros(4)), ("head", torch.zeros(2)))

    def write_adapter(self, folder: Path) -> int:
        self.load()
        (folder / "adapter").touch()
        return 1

    def export(self, path: Path) -> None:  # noqa: ARG002
        self.load()

    load_state = export


class SleepingEngine:
    """An engine that loses its weights while it sleeps."""

    policy_version, keeps_weights = 0, False

    def __init__(self, gpu: Gpu, *, has_adapter: bool) -> None:
        self.gpu, self.has_weights, self.is_awake = gpu, True, True
        self.has_adapter, self.loaded = has_adapter, not has_adapter
        self.wake_kv_cache()

    def sleep(self) -> None:
        self.gpu.has_cache = self.has_weights = self.is_awake = False

    def wake_weights(self) -> None:
        self.is_awake = True

    def wake_kv_cache(self) -> None:
        assert self.is_awake
        self.gpu.has_cache = True
        self.gpu.check()

    def load_weights(self, weights: Iterator, *, policy_version: int) -> None:
        assert self.is_awake
        self.has_weights = [name for name, _ in weights] == ["embedding", "head"]
        self.policy_version = policy_version

    def load_adapter(self, folder: Path, *, policy_version: int) -> None:
        assert (folder / "adapter").exists()
        self.loaded, self.policy_version = True, policy_version

    def advance(self, submit: Sequence, *, slots: int, max_steps: int) -> str:  # noqa: ARG002
        assert self.gpu.has_cache
        assert self.has_weights
        assert self.loaded
        return "tick"


@pytest.mark.parametrize("lora", [{}, {"rank": 4}, {"rank": 4, "sync": LoraSync.merged}])
def test_the_learner_is_away_whenever_the_engine_has_its_cache(
    lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Start, evaluation before the first step, two steps, an export, a resume. Fails when one of
    them has both on the device, samples with weights that sleep has discarded, or makes a wrong
    policy version of them.
    """
    config = LoraConfig(**{"sync": LoraSync.adapter, **lora}) if lora else LoraConfig()
    has_adapter = bool(lora) and config.sync is LoraSync.adapter
    gpu = Gpu()
    learner = StandInLearner(gpu, merged=not has_adapter)
    monkeypatch.setattr(worker_module, "build_learner", lambda *_, **__: (learner, learner.update))
    monkeypatch.setattr(
        worker_module,
        "build_engine",
        lambda *_, **__: SleepingEngine(gpu, has_adapter=has_adapter),
    )
    worker = Worker(replace(SETTINGS, config=replace(TrainConfig(), lora=config)))
    worker.build_learner(LearnerConfig())
    worker.build_engine(EngineConfig(), sleeps=True, keeps_parked=False)
    if has_adapter:
        worker.load_first_adapter()

    def sample() -> None:
        assert worker.advance(Requests(0), slots=1, max_steps=1) == "tick"

    sample()
    for version in (1, 2):
        worker.update([])
        assert worker.sync_weights(version).read()["sync/bytes"] == 24 + has_adapter
        sample()
    worker.export(tmp_path)
    assert worker.engine.policy_version == 2
    sample()
    worker.load_state(tmp_path)
    worker.sync_weights(2)
    sample()
