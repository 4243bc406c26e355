"""Parked samples on real vLLM: their KV cache is kept and reused after new weights are loaded."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_engine import request_of, small_engine
from tiny_models import write_tiny_qwen3

from april_rl.config.lora import LoraConfig
from april_rl.start.planning.model import read_model
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.rollout.requests import Request
from april_rl.types import Completion

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

BUDGET = 60
WINDOW = 160
SLOTS = 8
KV_CACHE_GIB = 0.002
BLOCK = 32  # tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, seed in [("now", 0), ("later", 1)]:
        write_tiny_qwen3(root / name, seed=seed)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def only_engine(folders: dict[str, Path]) -> VllmEngine:
    return small_engine(
        folders["now"],
        max_model_len=WINDOW,
        max_num_seqs=SLOTS,
        args={"max_num_batched_tokens": 64},
        kv_cache_gib=KV_CACHE_GIB,
        keeps_parked=True,
        stop_tokens=(),
    )


@pytest.fixture
def engine(only_engine: VllmEngine, folders: dict[str, Path]) -> Iterator[VllmEngine]:
    load(only_engine, folders["now"])
    yield only_engine
    only_engine.abort()
    only_engine.release_parked()


def load(engine: VllmEngine, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    engine.load_weights(iter(weights.items()), policy_version=engine.policy_version + 1)


def request(prompt_id: int, so_far: Sequence[int] = (), *, length: int = 20) -> Request:
    prompt = tuple(5 + (prompt_id * 31 + i * 7) % 80 for i in range(length))
    return request_of(prompt_id, prompt, so_far, budget=BUDGET, seed=1000 + prompt_id)


def whole(engine: VllmEngine, requests: list[Request]) -> dict[int, Completion]:
    """Return the response to each prompt, generated without an interruption."""
    tick = engine.advance(requests, slots=SLOTS, max_steps=10_000)
    return {c.sample_id.prompt_id: c for c in tick.finished}


def park(engine: VllmEngine, requests: list[Request], *, steps: int) -> dict[int, Completion]:
    assert not engine.advance(requests, slots=SLOTS, max_steps=steps).finished
    return {c.sample_id.prompt_id: c for c in engine.abort()}


def test_a_kept_sample_continues_as_if_never_interrupted(engine, folders):
    """With the same weights loaded again, even after other requests. Fails when the cache, the
    position or the seed is wrong.
    """
    prompts = [request(i) for i in range(6)]
    expected = whole(engine, prompts)
    first = park(engine, prompts, steps=25)
    load(engine, folders["now"])
    assert len(whole(engine, [request(100 + i) for i in range(20)])) == 20  # an evaluation
    on = [request(i, c.token_ids) for i, c in first.items()]
    tick = engine.advance(on, slots=SLOTS, max_steps=1)
    assert (tick.prefilled_tokens, tick.generated_tokens) == (0, 6)
    assert tick.context_token_steps == sum(len(r.token_ids) for r in on)
    rest = engine.advance([], slots=SLOTS, max_steps=1000).finished
    assert len(rest) == 6
    for completion in rest:
        before = first[completion.sample_id.prompt_id]
        whole_ids = expected[completion.sample_id.prompt_id].token_ids
        assert before.token_ids + completion.token_ids == whole_ids
        assert completion.policy_version == before.policy_version + 1
        assert completion.context_version == before.context_version == before.policy_version
        assert (completion.start, completion.finish_reason) == (len(before.token_ids), "length")


@pytest.mark.parametrize("when", ["running", "parked"])
def test_a_request_that_vllm_has_forgotten_is_prefilled_again(engine, folders, when):
    """Its tokens are not lost. Fails when a sample without its request ends the run."""
    prompts = [request(i) for i in range(3)]
    expected = whole(engine, prompts)
    assert not engine.advance(prompts, slots=SLOTS, max_steps=25).finished
    (forgotten,) = (i for i, a in engine._running.items() if a.request.sample_id.prompt_id == 1)
    if when == "running":
        engine._core.abort_requests([forgotten])
    first = {c.sample_id.prompt_id: c for c in engine.abort()}
    if when == "parked":
        engine._core.abort_requests([forgotten])
    load(engine, folders["now"])
    last = whole(engine, [request(i, c.token_ids) for i, c in first.items()])
    for i, completion in last.items():
        assert [*first[i].token_ids, *completion.token_ids] == [*expected[i].token_ids]
        assert completion.is_kept == (i != 1)


def test_new_weights_sample_the_rest_and_new_prompts_do_not_read_an_old_cache(engine, folders):
    """Fails when the weight sync does not reach kept samples, or prompts share old blocks."""
    prompts = [request(i, length=80) for i in range(4)]
    first = park(engine, prompts, steps=20)
    load(engine, folders["later"])
    fresh = whole(engine, [request(i, length=80) for i in range(50, 54)])
    # The same prompts with other ids: if they shared old blocks, they would start from an old
    # cache.
    twins = [
        request_of(900 + i, request(i, length=80).prompt_token_ids, budget=1, seed=0)
        for i in range(4)
    ]
    tick = engine.advance(twins, slots=SLOTS, max_steps=1000)
    assert tick.prefilled_tokens == 4 * 80
    assert all(not c.is_kept for c in (*fresh.values(), *tick.finished))
    on = [request(i, c.token_ids, length=80) for i, c in first.items()]
    kept = engine.advance(on, slots=SLOTS, max_steps=1000).finished
    assert all(c.is_kept for c in kept)
    load(engine, folders["now"])
    unchanged = whole(engine, prompts)
    assert any(
        first[i].token_ids + c.token_ids != unchanged[i].token_ids
        for i, c in ((c.sample_id.prompt_id, c) for c in kept)
    )


def test_a_sample_that_continues_on_another_engine_is_prefilled(engine):
    """It starts on another engine than the one that parked it. Fails when the state is looked up by
    the sample only.
    """
    first = park(engine, [request(0)], steps=25)[0]
    shorter = request(0, first.token_ids[:-3])
    tick = engine.advance([shorter], slots=SLOTS, max_steps=2)
    assert tick.prefilled_tokens > 0
    completion = engine.abort()[0]
    assert not completion.is_kept


def test_the_cache_holds_as_many_tokens_as_the_memory_plan_counts(engine, folders):
    """In float32, up to a block. Fails when keys, values or a layer are counted once too often."""
    sizes = model_sizes(read_model(str(folders["now"])), LoraConfig())
    expected = KV_CACHE_GIB * 2**30 / (4 * sizes.kv_numbers)
    assert engine.kv_cache_tokens == pytest.approx(expected, abs=BLOCK)


@pytest.mark.parametrize("others", [[], [9]])
def test_kept_state_is_freed_when_only_other_samples_are_requested(engine, others):
    """A step that requests nothing keeps everything. Fails when samples that moved to another
    engine hold their memory forever, or a step without a rollout forgets every sample.
    """
    first = park(engine, [request(i) for i in range(4)], steps=25)
    park(engine, [request(i) for i in others], steps=25)
    on = [request(i, c.token_ids) for i, c in first.items()]
    tick = engine.advance(on, slots=SLOTS, max_steps=3)
    assert (tick.prefilled_tokens > 0) == bool(others)


def test_parked_samples_are_dropped_when_their_memory_is_needed(engine, folders):
    """Fails when running samples wait for blocks that idle samples hold."""
    held: list[Request] = []  # requested at every step, but after the samples that get the slots
    for base in range(0, 32, 4):
        prompts = [request(base + i, length=90) for i in range(4)]
        engine.advance([*prompts, *held], slots=4, max_steps=30)
        parts = {c.sample_id.prompt_id: c.token_ids for c in engine.abort() if c.token_ids}
        held += [request(i, ids, length=90) for i, ids in parts.items()]
    assert sum(len(r.token_ids) for r in held) > 1.5 * engine.kv_cache_tokens
    engine._parked.make_room()
    manager = engine._scheduler.kv_cache_manager
    others = max(SLOTS, manager.watermark_blocks)  # the next block of each slot, or the headroom
    assert manager.block_pool.get_num_free_blocks() >= others + WINDOW // BLOCK
    load(engine, folders["now"])
    assert len(whole(engine, [request(1000 + i, length=90) for i in range(20)])) == 20
    tick = engine.advance(held, slots=SLOTS, max_steps=10_000)
    assert len(tick.finished) == len(held)
    assert 0 < sum(c.is_kept for c in tick.finished) < len(held), "the youngest was dropped"
