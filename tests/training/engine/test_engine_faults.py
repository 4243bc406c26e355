"""Faults planted where real vLLM hands its results to the engine, and what the collector does."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from fake_outside import CountingScorer
from rollout_runs import Run, Setup
from safetensors.torch import load_file
from small_engine import request_of, small_engine
from tiny_models import write_tiny_qwen3
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from april_rl.errors import RunError
from april_rl.task.evaluation.evaluator import Evaluator
from april_rl.task.evaluation.held_out import HeldOut
from april_rl.task.evaluation.settings import SetSampling
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.rollout.collector import Collection
from april_rl.training.rollout.in_process import SerialEngines
from april_rl.training.rollout.record import GroupState
from april_rl.training.rollout.requests import Request
from april_rl.types import Prompt, SampleId

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

BUDGET = 12
Fault = Callable[[EngineCoreOutput], EngineCoreOutput | None]  # None: the output is lost


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(path)
    return path


@pytest.fixture(scope="module")
def engine(folder) -> VllmEngine:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return small_engine(folder, max_model_len=64, max_num_seqs=16)


@pytest.fixture
def planted(engine, monkeypatch) -> Callable[..., list[SampleId]]:
    """Plant a fault in the outputs of one sample, or of all; return the list of changed outputs."""

    def plant(fault: Fault, *, only: SampleId | None = None, times: int = 10**9) -> list[SampleId]:
        changed: list[SampleId] = []
        computed = engine._core.get_output

        def get_output() -> EngineCoreOutputs:
            outputs = computed()
            kept = []
            for output in outputs.outputs:
                sample_id = engine._running[output.request_id].request.sample_id
                if only in (None, sample_id) and len(changed) < times:
                    changed.append(sample_id)
                    output = fault(output)
                kept += [] if output is None else [output]
            outputs.outputs = kept
            return outputs

        monkeypatch.setattr(engine._core, "get_output", get_output)
        return changed

    return plant


def without_numbers(output: EngineCoreOutput) -> EngineCoreOutput:
    """Replace the log-probabilities by NaN."""
    nan = np.full_like(output.new_logprobs.logprobs, math.nan)
    output.new_logprobs = output.new_logprobs._replace(logprobs=nan)
    return output


def ended_by(engine: VllmEngine, reason: FinishReason) -> Fault:
    """Return a fault in which a request ends at once, without a token."""

    def end(output: EngineCoreOutput) -> EngineCoreOutput:
        engine._core.abort_requests([output.request_id])
        output.new_token_ids, output.new_logprobs, output.finish_reason = [], None, reason
        return output

    return end


def fault_of(engine: VllmEngine, kind: str) -> Fault:
    return {
        "nan": without_numbers,
        "empty": ended_by(engine, FinishReason.STOP),
        "error": ended_by(engine, FinishReason.ERROR),
    }[kind]


class RealRun:
    """A collector on the engine: α = 2, three groups of two per step."""

    def __init__(self, engine: VllmEngine, folder: Path) -> None:
        self._engine, self._weights = engine, load_file(folder / "model.safetensors")
        setup = Setup(alpha=2.0, budget=BUDGET, tick_steps=2, max_rejected_groups=9)
        self.run = Run(setup, SerialEngines([engine]))

    def step(self) -> Collection:
        version = self.run.version
        self._engine.load_weights(iter(self._weights.items()), policy_version=version)
        self.run.version += 1
        collection = self.run.collector.collect(version)
        for scored in collection.groups:
            assert len(scored.rewards) == 2
            for sample in scored.group.samples:
                assert 0 < sample.num_tokens <= BUDGET
                assert all(math.isfinite(value) for value in sample.behaviour_logprobs)
        return collection


@pytest.fixture
def real_run(engine, folder) -> Iterator[RealRun]:
    yield RealRun(engine, folder)
    engine.abort()


def request(prompt_id: int, *, max_tokens: int = BUDGET) -> Request:
    return request_of(prompt_id, (5, 6, 7), budget=max_tokens, seed=prompt_id)


@pytest.mark.parametrize("kind", ["nan", "empty", "error"])
def test_a_response_that_the_engine_fails_once_is_sampled_again(engine, planted, real_run, kind):
    """Fails when the run ends, the group is dropped, or the failed attempt leaves a token."""
    changed = planted(fault_of(engine, kind), only=SampleId(0, 1), times=2)
    collections = [real_run.step() for _ in range(4)]
    assert changed == [SampleId(0, 1)] * 2
    assert sum(tick.failed_attempts for c in collections for _, tick in c.record.ticks) == 2
    assert real_run.run.buffer.counts()[GroupState.dropped] == 0
    assert 0 in {s.group.prompt.id for collection in collections for s in collection.groups}


@pytest.mark.parametrize(
    ("kind", "reason", "said"),
    [
        ("nan", "engine nan_logprobs", "the engine's log-probabilities are not finite"),
        ("empty", "engine no_tokens", "the engine ended the response without a token"),
        ("error", "engine engine_error", "the engine ended it with an error"),
    ],
)
def test_a_group_whose_response_always_fails_is_dropped_with_the_reason(
    engine, planted, real_run, kind, reason, said
):
    """Its siblings and the other groups continue. Fails when it gets a reward, or is retried
    forever.
    """
    changed = planted(fault_of(engine, kind), only=SampleId(0, 1))
    collections = [real_run.step() for _ in range(4)]
    assert len(changed) == 3
    assert [len(collection.groups) for collection in collections] == [3] * 4
    assert 0 not in {s.group.prompt.id for collection in collections for s in collection.groups}
    assert real_run.run.buffer.drop_reasons == {reason: 1}
    notes = [note for collection in collections for note in collection.notes]
    assert [note for note in notes if f"sample 1 of prompt 0: {said}" in note]


def test_an_engine_that_fails_everything_ends_the_run_with_the_reason(planted, real_run):
    """Broken weights cause this. Fails when it is retried forever, or the failures end up as equal
    rewards.
    """
    planted(without_numbers)
    said = (
        r"dropped because a reward, environment or engine failed.*log-probabilities are not finite"
    )
    with pytest.raises(RunError, match=said):
        real_run.step()


def test_a_held_out_sample_that_the_engine_fails_does_not_count_as_wrong(engine, planted):
    """Fails when the incomplete response gets a reward: its prompt must be left out."""
    planted(without_numbers, only=SampleId(-2, 0))
    prompts = [
        Prompt(id=i, token_ids=(5, 6, 7), text="", answer="", source="held out") for i in range(3)
    ]
    held_out = HeldOut(
        name="held_out",
        path="held_out",
        prompts=prompts,
        sampling=SetSampling(
            num_samples=1, temperature=1.0, top_p=1.0, max_response_tokens=BUDGET, max_prompts=None
        ),
        function="a",
        answer_of=None,
    )
    for _ in range(2):
        evaluator = Evaluator(
            SerialEngines([engine]),
            CountingScorer(),
            temperature=1.0,
            num_slots=8,
            tick_steps=4,
            tick_timeout_s=1.0,
            seed=0,
        )
        rewards = evaluator.run(held_out, lambda _: None).rewards[:, 0]
        assert np.isnan(rewards).tolist() == [False, True, False]


def test_a_request_that_does_not_end_is_ended_at_its_limit(engine, monkeypatch):
    """vLLM gets a limit that is too large. Fails when the response grows beyond its budget."""
    asked = engine._sampling_params

    def without_limit(request: Request) -> SamplingParams:
        params = asked(request)
        params.max_tokens, params.stop_token_ids = 50, []
        return params

    monkeypatch.setattr(engine, "_sampling_params", without_limit)
    tick = engine.advance([request(1, max_tokens=5), request(2)], slots=2, max_steps=100)
    found = {c.sample_id.prompt_id: (len(c.token_ids), c.finish_reason) for c in tick.finished}
    assert found == {1: (5, "length"), 2: (BUDGET, "length")}
    assert not engine._core.engine_core.scheduler.requests


def test_a_request_whose_tokens_never_come_does_not_hold_up_the_others(planted, real_run):
    """It is parked at the end of each step, and continues when tokens come. Fails when a step waits
    for it, or its group is lost.
    """
    lost = planted(lambda _: None, only=SampleId(0, 1), times=5)
    collections = [real_run.step() for _ in range(6)]
    assert lost == [SampleId(0, 1)] * 5
    assert [len(collection.groups) for collection in collections] == [3] * 6
    assert 0 in {s.group.prompt.id for collection in collections for s in collection.groups}


def test_an_idle_engine_with_an_unfinished_response_is_reported(engine, planted):
    """RayEngines ends a run whose ticks come without a step (`runtime.stall_timeout_s`). Fails when
    a request that vLLM has forgotten counts as a step.
    """
    planted(lambda _: None)
    engine.advance([request(1)], slots=1, max_steps=100)
    tick = engine.advance([], slots=1, max_steps=3)
    assert tick.engine_steps == 0
    assert [completion.finish_reason for completion in engine.abort()] == [None]


def test_after_an_exception_in_a_step_every_sample_comes_back(engine, monkeypatch):
    """The worker's call then fails, which ends in a restart (test_resumed_runs_soak.py). Fails when
    waiting samples, or their tokens, are lost.
    """
    computed, steps = engine._core.get_output, []

    def get_output() -> EngineCoreOutputs:
        steps.append(None)
        if len(steps) == 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return computed()

    monkeypatch.setattr(engine._core, "get_output", get_output)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.advance([request(i) for i in range(4)], slots=3, max_steps=100)
    aborted = {c.sample_id.prompt_id: len(c.token_ids) for c in engine.abort()}
    assert aborted == {0: 3, 1: 3, 2: 3, 3: 0}
