"""Engines with several workers: ticks of ranks that belong together; test_runs.py has
whole runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from april_rl.errors import RunError
from april_rl.run.supervision.watchdog import Watchdog
from april_rl.training.rollout.requests import Request, Requests
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.training.runtime.cluster import start_ray, stop_ray
from april_rl.training.runtime.engines import RayEngines
from april_rl.training.runtime.lockstep import Fingerprint, fingerprint
from april_rl.types import Completion, SampleId

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
NUM_RANKS, SIZE = 4, 2  # two engines of two workers


@ray.remote
class Rank:
    """A worker without a model: each tick finishes its requests with the given tokens."""

    def __init__(self, token: int, policy_version: int) -> None:
        self._token, self._policy_version = token, policy_version
        self._held: list[Request] = []

    def ready(self) -> None:
        """Return at once, because the process exists."""

    def advance(self, submit: Requests, *, slots: int, max_steps: int) -> Tick:  # noqa: ARG002
        """Finish all but the last request of `submit`."""
        self._held += submit.each()
        *finished, last = self._held
        self._held = [last]
        return Tick(
            finished=Completions(self._completion(request, "stop") for request in finished),
            engine_steps=max_steps,
            slot_steps=max_steps,
            generated_tokens=len(finished),
            elapsed_s=0.0,
        )

    def abort(self) -> Completions:
        held, self._held = self._held, []
        return Completions(self._completion(request, None) for request in held)

    def follow_advance(self, submit: Requests, *, slots: int, max_steps: int) -> Fingerprint:
        return fingerprint(self.advance(submit, slots=slots, max_steps=max_steps).finished)

    def follow_abort(self) -> Fingerprint:
        return fingerprint(self.abort())

    def _completion(self, request: Request, reason: Any) -> Completion:
        return Completion(
            sample_id=request.sample_id,
            start=request.start,
            policy_version=self._policy_version,
            context_version=self._policy_version,
            token_ids=(self._token,),
            logprobs=(-1.0,),
            finish_reason=reason,
        )


@dataclass(kw_only=True)
class Group:
    """The part of `RayWorkers` that `RayEngines` uses."""

    engine_actors: list[list[Any]]
    policy_version: int
    watchdog: Watchdog


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    start_ray(num_workers=NUM_RANKS, address=None)
    yield
    stop_ray()


def engines_of(folder: Path, *tokens: int, policy_version: int = 0) -> RayEngines:
    """Return engines of SIZE ranks; each rank samples its entry of `tokens`, as version 0 of the
    policy.
    """
    ranks = [Rank.options(num_cpus=0).remote(token, 0) for token in tokens]
    ray.get([rank.ready.remote() for rank in ranks])
    group = Group(
        engine_actors=[ranks[i : i + SIZE] for i in range(0, len(ranks), SIZE)],
        policy_version=policy_version,
        watchdog=Watchdog(report=folder / "report", stall_timeout_s=60, call_timeout_s=60),
    )
    return RayEngines(group, deterministic=True)


def of_prompt(prompt_id: int, *indices: int) -> Requests:
    count = len(indices)
    return Requests(0, [prompt_id] * count, indices, [(1, 2)] * count, [4] * count, [()] * count)


@pytest.mark.usefixtures("_cluster")
def test_an_engine_of_several_ranks_returns_every_completion_once(tmp_path):
    """Fails when the ranks of an engine count as engines, or ticks of other ranks than the first
    remain.
    """
    engines = engines_of(tmp_path, 7, 7, 8, 8)
    assert engines.num_engines == 2
    for engine in range(2):
        engines.launch(engine, of_prompt(engine, 0, 1, 2), slots=4, max_steps=2)
    ticks = engines.wait(60.0)
    assert [engine for engine, _ in ticks] == [0, 1]
    finished = [[(c.sample_id, [*c.token_ids]) for c in tick.finished] for _, tick in ticks]
    assert finished == [[(SampleId(e, i), [7 + e]) for i in range(2)] for e in range(2)]
    engines.launch(0, of_prompt(0, 3), slots=4, max_steps=2)
    completions, stalled = engines.abort(60.0)
    assert stalled == []
    assert [(c.sample_id, c.finish_reason) for c in completions] == [
        (SampleId(0, 2), "stop"),
        (SampleId(0, 3), None),
        (SampleId(1, 2), None),
    ]


@pytest.mark.usefixtures("_cluster")
def test_a_rank_that_samples_other_tokens_ends_the_run_in_a_tick_and_in_an_abort(tmp_path):
    """Fails when only the first rank of an engine is checked."""
    engines = engines_of(tmp_path, 7, 7, 8, 9)
    engines.launch(1, of_prompt(1, 0, 1), slots=4, max_steps=2)
    with pytest.raises(RunError, match="worker 3 did not sample the same tokens as worker 2"):
        engines.wait(60.0)
    with pytest.raises(RunError, match="worker 3"):
        engines.abort(60.0)


@pytest.mark.usefixtures("_cluster")
def test_an_engine_with_a_wrong_policy_version_ends_the_run(tmp_path):
    """This happens when a sync transferred nothing. Fails when the completions' versions are not
    checked: their samples would wait forever.
    """
    engines = engines_of(tmp_path, 7, 7, policy_version=1)
    engines.launch(0, of_prompt(0, 0, 1), slots=4, max_steps=2)
    with pytest.raises(RunError, match="engine 0 samples with policy version 0"):
        engines.wait(60.0)
