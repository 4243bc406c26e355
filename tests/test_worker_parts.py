"""What a worker asks of its engine, its learner and its process group, without the first two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from april_rl.engine import vllm_engine
from april_rl.engine.options import EngineOptions
from april_rl.runtime.supervision.heartbeat import Heartbeat
from april_rl.runtime.worker import Worker


class Log:
    """An engine and a learner that note what they are asked."""

    def __init__(self, *, policy_version: int) -> None:
        self.calls: list[str] = []
        self.policy_version = policy_version

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake_weights(self) -> None:
        self.calls.append("wake weights")

    def wake_kv_cache(self) -> None:
        self.calls.append("wake KV cache")

    def load_weights(self, weights: Iterator, *, policy_version: int) -> None:
        assert [name for name, _ in weights] == ["embedding", "head"]
        self.calls.append(f"load version {policy_version}")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("embedding", torch.zeros(4)), ("head", torch.zeros(2)))

    def export(self, path: Path) -> None:
        self.calls.append(f"export {path.name}")

    def offload(self) -> None:
        self.calls.append("offload")


class BareWorker(Worker):
    """A worker whose engine and learner are the same log."""

    def __init__(self, log: Log) -> None:
        self.heartbeat = Heartbeat()
        self._engine = self._learner = log


def test_a_checkpoint_is_written_while_the_engine_sleeps_and_it_wakes_with_the_same_weights():
    """On a GPU masters that were offloaded come back for it. Fails when they meet a KV cache there,
    or when an engine that slept is left without weights.
    """
    log = Log(policy_version=7)
    BareWorker(log).export(Path("step_7"))
    assert log.calls == [
        *("sleep", "export step_7"),
        *("wake weights", "load version 7", "offload", "wake KV cache"),
    ]


def test_a_sync_wakes_the_kv_cache_when_what_is_offloaded_has_left():
    """Fails when the cache takes its memory while the masters are still there."""
    log = Log(policy_version=7)
    metrics = BareWorker(log).sync_weights(8).read()
    assert log.calls == ["wake weights", "load version 8", "offload", "wake KV cache"]
    assert metrics["sync/bytes"] == 24


@dataclass
class NoSettings:
    """Those of an engine that needs none."""


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_workers_engine_is_built_as_it_is_decided(monkeypatch, sleeps):
    """Fails when the decision of the memory plan does not reach vLLM."""
    built: list[EngineOptions] = []
    monkeypatch.setattr(vllm_engine, "VllmEngine", lambda *, options: built.append(options))
    worker = BareWorker(Log(policy_version=0))
    options = EngineOptions(sleeps=not sleeps)
    worker._settings = SimpleNamespace(engine=NoSettings(), options=options)  # type: ignore[assignment]
    worker.build_engine(sleeps=sleeps)
    assert built == [EngineOptions(sleeps=sleeps)]


JOIN = """
import torch
import torch.distributed as dist
from test_worker_parts import BareWorker, Log

worker = BareWorker(Log(policy_version=0))
worker._settings = type("Settings", (), {"threads": 0, "device": "cpu"})
worker.join(worker.listen(1), rank=0, world_size=1, timeout_s=7200.0)
for group in (dist.group.WORLD, dist.new_group([0])):
    print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
"""


def test_no_collective_gives_up_before_the_watchdog():
    """Of the process group of all ranks, and of one that somebody makes later. Fails when torch's
    own limit of half an hour ends a worker that waits for a slow one.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "ignore", "-c", JOIN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["7200.0", "7200.0"], done.stderr
