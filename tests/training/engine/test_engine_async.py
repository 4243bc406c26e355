"""Asynchronous scheduling on real vLLM gives the tokens of synchronous scheduling and
loses none.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_engine import request_of, small_engine
from tiny_models import write_tiny_qwen3

from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.rollout.requests import Request
from april_rl.types import Completion, SampleId

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

SLOTS, NUM_SAMPLES = 6, 20
BUDGET, PROMPT_TOKENS = 60, 24
STOP = 40  # a common token, so that some responses end early


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_qwen3(path)
    return path


def build(folder: Path, *, is_async: bool, kv_cache_gib: float = 0.01) -> VllmEngine:
    return small_engine(
        folder,
        max_model_len=PROMPT_TOKENS + BUDGET,
        max_num_seqs=SLOTS,
        kv_cache_gib=kv_cache_gib,
        keeps_parked=True,
        stop_tokens=(STOP,),
        args={"max_num_batched_tokens": 64, "async_scheduling": is_async},
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[SampleId, Completion]:
    """Generate each sample without interruption, by synchronous scheduling."""
    engine = build(folder, is_async=False)
    finished = engine.advance(requests(), slots=SLOTS, max_steps=10_000).finished
    return {completion.sample_id: completion for completion in finished}


@pytest.fixture(scope="module")
def engine(folder: Path) -> VllmEngine:
    return build(folder, is_async=True)


def requests(so_far: dict[SampleId, Completion] | None = None) -> list[Request]:
    """Return requests for the samples, or for the samples of `so_far` from where they stopped."""
    asked = [SampleId(i, 0) for i in range(NUM_SAMPLES)] if so_far is None else [*so_far]
    return [request(sample_id, (so_far or {}).get(sample_id)) for sample_id in asked]


def request(sample_id: SampleId, parked: Completion | None) -> Request:
    tokens: Sequence[int] = () if parked is None else parked.token_ids
    number = sample_id.prompt_id
    prompt = tuple(3 + (number * 13 + j) % 90 for j in range(PROMPT_TOKENS))
    return request_of(number, prompt, tokens, budget=BUDGET, seed=number)


def test_the_tokens_equal_synchronous_scheduling(engine, expected):
    """Fails when a step reads a token that is not there yet, or sampling depends on the
    schedule.
    """
    finished = engine.advance(requests(), slots=SLOTS, max_steps=10_000).finished
    assert {c.finish_reason for c in finished} == {"stop", "length"}
    assert len(finished) == len(expected)
    for completion in finished:
        same = expected[completion.sample_id]
        assert completion.token_ids == same.token_ids
        assert completion.logprobs == pytest.approx(same.logprobs, abs=1e-5)


def is_computing(engine: VllmEngine) -> bool:
    return bool(engine._core.engine_core.batch_queue)


def test_ticks_with_a_step_in_between_give_the_tokens_of_one_call(engine, expected):
    """Fails when a tick waits for its last step, or a request joins or ends wrongly during that
    step.
    """
    engine.release_parked()
    finished, submit, num_ticks = [], requests(), 0
    while len(finished) < NUM_SAMPLES:
        tick = engine.advance(submit, slots=SLOTS, max_steps=3)
        finished += tick.finished
        submit, num_ticks = [], num_ticks + 1
        assert is_computing(engine) == bool(engine._running)
    assert num_ticks > 2 * BUDGET // 3
    assert not engine.abort()
    assert {c.sample_id: c.token_ids for c in finished} == {
        c.sample_id: c.token_ids for c in expected.values()
    }


@pytest.mark.parametrize("steps", [1, 2, 7, 30])
@pytest.mark.parametrize("kept", [True, False])
def test_no_token_is_lost_at_an_abort_and_resumed_samples_continue(
    engine, expected, folder, steps, kept
):
    """Fails when the step in flight after a tick is lost, or its tokens come twice."""
    engine.release_parked()
    first = engine.advance(requests(), slots=SLOTS, max_steps=steps)
    assert first.engine_steps == steps
    assert is_computing(engine)
    aborted = engine.abort()
    assert not is_computing(engine)
    ended = [*first.finished, *(c for c in aborted if c.finish_reason is not None)]
    parked = {c.sample_id: c for c in aborted if c.finish_reason is None}
    assert len(ended) + len(parked) == NUM_SAMPLES
    num_tokens = sum(len(c.token_ids) for c in (*ended, *parked.values()))
    assert 0 < num_tokens - first.generated_tokens <= SLOTS

    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    engine.load_weights(iter(weights.items()), policy_version=engine.policy_version + 1)
    if not kept:
        engine.release_parked()
    rest = engine.advance(requests(parked), slots=SLOTS, max_steps=10_000)
    whole = {c.sample_id: c.token_ids for c in ended}
    whole |= {c.sample_id: parked[c.sample_id].token_ids + c.token_ids for c in rest.finished}
    assert whole == {c.sample_id: c.token_ids for c in expected.values()}
    assert (min(c.context_version for c in rest.finished) < engine.policy_version) == kept


def test_a_full_cache_preempts_without_changing_tokens(folder, expected):
    """Fails when a preempted sample loses the token that was in flight."""
    pressed = build(folder, is_async=True, kv_cache_gib=0.0004)
    tick = pressed.advance(requests(), slots=SLOTS, max_steps=10_000)
    assert tick.preempted_samples > 0
    assert {c.sample_id: c.token_ids for c in tick.finished} == {
        c.sample_id: c.token_ids for c in expected.values()
    }
