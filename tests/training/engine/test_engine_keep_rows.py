"""Parked samples in vLLM's Model Runner V2, which is made for GPUs, on Triton's interpreter."""

from pathlib import Path
from typing import NamedTuple

import pytest
from interpreted_runner import use_runner_of_gpus
from own_process import in_own_process

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

SLOTS = 4
BUDGET = 10


class Found(NamedTuple):
    """Counts of parked samples by the way they continued."""

    # Tokens that were prefilled when they continued, with the same weights loaded again.
    prefilled_tokens: int
    num_kept: int
    # Whether tokens and log-probabilities equal those of an undisturbed run.
    is_as_if_nothing_had_happened: bool
    num_others: int  # samples that finished while others were parked
    num_idle: int  # parked samples that still had their rows after the others


def run(folder: Path) -> Found:
    """Park three samples of four slots and continue them; park them again and fill all slots with
    other samples.
    """
    use_runner_of_gpus()
    import test_engine_keep as keep
    from small_engine import small_engine
    from tiny_models import write_tiny_qwen3

    write_tiny_qwen3(folder)
    engine = small_engine(
        folder,
        max_model_len=64,
        max_num_seqs=SLOTS,
        args={"max_num_batched_tokens": 128},
        kv_cache_gib=0.002,
        keeps_parked=True,
        stop_tokens=(),
    )
    keep.BUDGET, keep.SLOTS = BUDGET, SLOTS
    prompts = [keep.request(i) for i in range(3)]
    expected = keep.whole(engine, prompts)
    first = keep.park(engine, prompts, steps=4)
    keep.load(engine, folder)
    on = [keep.request(i, c.token_ids) for i, c in first.items()]
    prefilled = engine.advance(on, slots=SLOTS, max_steps=1).prefilled_tokens
    rest = {
        c.sample_id.prompt_id: c for c in engine.advance([], slots=SLOTS, max_steps=1000).finished
    }
    is_same = all(
        (a.token_ids + b.token_ids, a.logprobs + b.logprobs) == (c.token_ids, c.logprobs)
        for a, b, c in ((first[i], rest[i], expected[i]) for i in range(3))
    )
    keep.park(engine, [keep.request(10 + i) for i in range(3)], steps=4)
    others = keep.whole(engine, [keep.request(20 + i) for i in range(2)])
    return Found(
        prefilled_tokens=prefilled,
        num_kept=sum(c.is_kept for c in rest.values()),
        is_as_if_nothing_had_happened=is_same,
        num_others=len(others),
        num_idle=len(engine._parked._idle),
    )


@pytest.mark.soak
def test_parked_samples_continue_and_are_dropped_in_the_model_runner_for_gpus(tmp_path):
    """Fails when this runner forgets a sample that is not computed for a while, or parked samples
    hold rows that others need: it has engine.max_num_seqs rows.
    """
    pytest.importorskip("triton")
    found = in_own_process(run, tmp_path)
    assert found == Found(
        prefilled_tokens=0, num_kept=3, is_as_if_nothing_had_happened=True, num_others=2, num_idle=2
    )
