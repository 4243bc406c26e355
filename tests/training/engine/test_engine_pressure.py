"""Real vLLM with a KV cache that is too small: the counters match what the scheduler did."""

import random
from pathlib import Path
from typing import NamedTuple

import pytest
from small_engine import request_of, small_engine
from tiny_models import write_tiny_qwen3
from vllm.v1.core.sched.output import SchedulerOutput

from april_rl.training.engine import options
from april_rl.training.rollout.requests import Request
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Completion

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

SLOTS, PROMPT_TOKENS, LONGEST = 16, 20, 200
NUM_SAMPLES = 48
BLOCK_TOKENS, BLOCK_BYTES = 32, 32 * 2 * 2 * 2 * 32 * 2  # tokens · layers · (k, v) · heads · ...
NEEDED_BLOCKS = SLOTS * 3  # about what the slots need at the mean length
SMALL_CACHE_GIB = NEEDED_BLOCKS / 3 * BLOCK_BYTES / 2**30


class Seen(NamedTuple):
    """One engine step, from vLLM's scheduler output and lists."""

    scheduled_tokens: int
    running: int
    context_tokens: int
    preempted: int


class Watched(NamedTuple):
    """Ticks and completions of an engine for all requests, and its scheduler's steps."""

    ticks: list[Tick]
    finished: list[Completion]
    steps: list[Seen]


def watch(folder: Path, *, headroom: float) -> Watched:
    """Run all requests; the scheduler's outputs are recorded independently of the counters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "KV_CACHE_HEADROOM", headroom)
        engine = small_engine(
            folder,
            max_model_len=PROMPT_TOKENS + LONGEST,
            max_num_seqs=SLOTS,
            args={"max_num_batched_tokens": 512},
            kv_cache_gib=2 * SMALL_CACHE_GIB,  # float32
            stop_tokens=(),
        )
    steps: list[Seen] = []
    core = engine._core.engine_core
    execute = core.model_executor.execute_model

    def written_down(output: SchedulerOutput, non_block: bool = False):
        running = core.scheduler.running
        steps.append(
            Seen(
                output.total_num_scheduled_tokens,
                len(running),
                sum(request.num_prompt_tokens + request.num_output_tokens for request in running),
                len(output.preempted_req_ids or ()),
            )
        )
        return execute(output, non_block=non_block)

    core.model_executor.execute_model = written_down
    ticks = [engine.advance(requests(), slots=SLOTS, max_steps=25)]
    while sum(len(tick.finished) for tick in ticks) < NUM_SAMPLES:
        ticks.append(engine.advance([], slots=SLOTS, max_steps=25))
    return Watched(ticks, [completion for tick in ticks for completion in tick.finished], steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_qwen3(path)
    return path


@pytest.fixture(scope="module")
def pressed(folder: Path) -> Watched:
    """Use vLLM's own admission: a request starts if it fits now."""
    return watch(folder, headroom=0.0)


def requests() -> list[Request]:
    """Return requests for responses of very different lengths, each with its own prompt."""
    draw = random.Random(0)
    return [
        request_of(
            i,
            tuple(3 + (i * 13 + j * 7) % 90 for j in range(PROMPT_TOKENS)),
            budget=min(LONGEST, int(draw.lognormvariate(4.0, 0.7)) + 1),
            seed=i,
        )
        for i in range(NUM_SAMPLES)
    ]


def test_counters_match_the_scheduler(pressed):
    """Fails when a request that waits for memory counts as running, or recomputation does not
    count.
    """
    ticks, finished, steps = pressed
    preemptions = sum(step.preempted for step in steps)
    assert preemptions > 20  # the cache is too small for the slots, so there is something to count
    assert sum(tick.preempted_samples for tick in ticks) == preemptions
    assert sum(tick.engine_steps for tick in ticks) == len(steps)
    assert sum(tick.slot_steps for tick in ticks) == sum(step.running for step in steps)
    assert sum(tick.context_token_steps for tick in ticks) == sum(
        step.context_tokens for step in steps
    )
    # The last step of each prefill, first or repeated, samples a token.
    generated = sum(tick.generated_tokens for tick in ticks)
    assert generated == sum(request.max_tokens for request in requests())
    assert sum(tick.prefilled_tokens for tick in ticks) == sum(
        step.scheduled_tokens for step in steps
    ) - (generated - NUM_SAMPLES - preemptions)
    assert len(finished) == NUM_SAMPLES


def test_headroom_avoids_most_preemptions_without_changing_tokens(pressed, folder):
    """Fails when the setting does not reach vLLM."""
    roomy = watch(folder, headroom=0.3)
    many, few = (sum(t.preempted_tokens for t in each.ticks) for each in (pressed, roomy))
    assert few < many / 2
    tokens, same = ({c.sample_id: c.token_ids for c in each.finished} for each in (pressed, roomy))
    assert same == tokens
