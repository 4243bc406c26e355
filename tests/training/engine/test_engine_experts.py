"""Expert choices that the engine reports against the same model in transformers.

With vLLM's model runner for GPUs: over an abort and new weights, for siblings, long prompts and a
full cache.
"""

import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from byte_tokenizer import hf_byte_tokenizer
from interpreted_runner import use_runner_of_gpus
from own_process import in_own_process

from april_rl.training.rollout.requests import Request
from april_rl.types import Completion, Experts, SampleId

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from april_rl.training.engine.attempt import Attempt
    from april_rl.training.engine.vllm_engine import VllmEngine

SLOTS, BUDGET, STEPS = 4, 44, 9
TOKENS = {"max_num_batched_tokens": 64}
# By prompt id. Both are longer than a block (32 tokens), and one is longer than a step (64).
PROMPTS = {
    prompt_id: tuple(5 + (prompt_id * 31 + i * 7) % 80 for i in range(length))
    for prompt_id, length in ((0, 60), (1, 90))
}


def request(sample_id: SampleId, parts: Sequence[Completion]) -> Request:
    """Return a request as the collector makes it."""
    prompt, start = PROMPTS[sample_id.prompt_id], sum(len(part.token_ids) for part in parts)
    return Request(
        sample_id=sample_id,
        prompt_token_ids=prompt,
        parts=tuple(part.token_ids for part in parts),
        start=start,
        max_tokens=BUDGET - start,
        seed=7 * sample_id.prompt_id + sample_id.index,
        num_routed=len(prompt) + start - 1 if start else 0,
    )


def choices_of(folder: Path, token_ids: Sequence[int]) -> "NDArray[Any]":
    """Return the experts of each token in transformers, [T, layers with experts, 2], sorted."""
    import torch
    from transformers import AutoModelForCausalLM

    from april_rl.training.learner.model.routers import Routers

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routers = Routers(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return np.sort(torch.stack(routers.last_choices(), dim=1).numpy(), axis=-1)


def run(folders: list[Path], settings: dict[str, Any]) -> tuple[list[str], int]:
    """Park samples of one model and continue them with the next; return what is wrong, and the
    number of preempted requests.
    """
    use_runner_of_gpus()
    from small_engine import small_engine
    from test_engine_keep import load

    engine: VllmEngine = small_engine(
        folders[0],
        max_model_len=160,
        max_num_seqs=SLOTS,
        stop_tokens=(),
        reports_experts=True,
        **{"kv_cache_gib": 0.004, "args": TOKENS} | settings,
    )
    sample_ids = [SampleId(prompt_id, index) for prompt_id in PROMPTS for index in range(2)]
    parts: dict[SampleId, list[Completion]] = {sample_id: [] for sample_id in sample_ids}
    preempted = 0
    for folder, steps in zip(folders, (STEPS, 10_000), strict=True):
        load(engine, folder)
        submit = [request(sample_id, parts[sample_id]) for sample_id in sample_ids]
        tick = engine.advance(submit, slots=SLOTS, max_steps=steps)
        preempted += tick.preempted_samples
        for completion in (*tick.finished, *engine.abort()):
            parts[completion.sample_id].append(completion)
    is_kept = settings.get("keeps_parked", False)
    wrong = [each for p in parts.values() for each in _faults(p, folders, is_kept=is_kept)]
    return wrong, preempted


def _faults(parts: list[Completion], folders: list[Path], *, is_kept: bool) -> list[str]:
    """Compare the experts of a sample with those that each model chooses for all tokens."""
    sample_id = parts[0].sample_id
    token_ids = [*PROMPTS[sample_id.prompt_id], *(t for part in parts for t in part.token_ids)]
    found, expected, start = [], [], 0
    for part, folder in zip(parts, folders, strict=True):
        if not part.token_ids:  # the sample had no slot
            continue
        end = len(PROMPTS[sample_id.prompt_id]) + part.start + len(part.token_ids) - 1
        if part.experts is None or part.experts.num_tokens != end - start:
            return [f"{sample_id}: {part.experts and part.experts.num_tokens}, not {end - start}"]
        rows = np.asarray(part.experts.numbers).reshape(end - start, 3, 2)
        found.append(np.sort(rows[:, [0, 2]], axis=-1))  # the layer between them has no experts
        expected.append(choices_of(folder, token_ids)[start:end])
        start = end
    if is_kept:  # the second model continues from what the first one computed
        found, expected = found[:1], expected[:1]
    differ = (np.concatenate(found) != np.concatenate(expected)).any(axis=(1, 2))
    return [f"{sample_id}: token {number}" for number in np.flatnonzero(differ)]


def attempt_with(folder: Path, *, num_rows: int) -> "Attempt":
    """Return an attempt that continues two tokens and has sampled `abc` up to its stop text `b`,
    with experts of `num_rows` tokens.
    """
    from april_rl.training.engine.attempt import Attempt, StopTexts

    tokenizer = hf_byte_tokenizer()
    tokenizer.save_pretrained(folder)
    token_ids = tokenizer.encode("abc")
    attempt = Attempt(
        Request(SampleId(0, 0), (1, 2), 0, max_tokens=9, seed=0, stop=("b",)),
        StopTexts(str(folder)),
        context_version=0,
    )
    output: Any = SimpleNamespace(
        new_token_ids=token_ids,
        new_logprobs=SimpleNamespace(
            logprob_token_ids=np.array(token_ids)[:, None], logprobs=np.zeros((3, 1))
        ),
        routed_experts=np.arange(2 * num_rows, dtype=np.uint16).reshape(num_rows, 1, 2),
        finish_reason=None,
    )
    assert attempt.take(output) == "stop"
    return attempt


def test_tokens_after_a_stop_text_are_dropped_with_their_experts(tmp_path):
    part = attempt_with(tmp_path, num_rows=4).completion(0, "stop")
    assert len(part.token_ids) == 2
    assert part.experts == Experts(array("H", range(6)), num_layers=1, num_chosen=2)


def test_missing_experts_are_an_error_that_names_the_sample(tmp_path):
    """Fails when a sample could get the experts of other tokens."""
    with pytest.raises(RuntimeError, match="experts of 2 tokens instead of 3"):
        attempt_with(tmp_path, num_rows=2).completion(0, "stop")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize(
    ("settings", "num_preempted"),
    [
        ({}, 0),
        ({"args": {**TOKENS, "async_scheduling": True}, "keeps_parked": True}, 0),
        ({"kv_cache_gib": 0.00055}, 1),
    ],
    ids=["prefilled again", "kept, a step ahead", "full cache"],
)
def test_reported_experts_come_from_the_model_that_sampled_the_next_token(
    tmp_path, settings, num_preempted
):
    """Fails when a token has no experts or another token's, or gets the newer model's experts when
    a parked sample is prefilled again.
    """
    pytest.importorskip("triton")
    from tiny_models import write_tiny_qwen3_moe

    folders = [tmp_path / "now", tmp_path / "later"]
    for seed, folder in enumerate(folders):
        write_tiny_qwen3_moe(folder, seed=seed, initializer_range=0.3)
    wrong, preempted = in_own_process(run, folders, settings)
    assert wrong == []
    assert preempted >= num_preempted


def run_rank(rank: int, address: str, folder: Path) -> tuple[list[bool], list[str]]:
    """Return whether each completion of an engine of two ranks has experts, and what is wrong with
    the experts of the first rank.
    """
    use_runner_of_gpus()
    import torch.distributed as dist
    from small_engine import small_engine

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    engine = small_engine(
        folder,
        max_model_len=160,
        max_num_seqs=SLOTS,
        args=TOKENS,
        kv_cache_gib=0.004,
        stop_tokens=(),
        reports_experts=True,
        tensor_parallel_size=2,
    )
    submit = [request(SampleId(prompt_id, index), []) for prompt_id in PROMPTS for index in (0, 1)]
    engine.advance(submit, slots=SLOTS, max_steps=STEPS)
    parts = [part for part in engine.abort() if part.token_ids]
    wrong = [w for part in parts if rank == 0 for w in _faults([part], [folder], is_kept=False)]
    dist.barrier()
    return [part.experts is not None for part in parts], wrong


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_first_rank_of_an_engine_reports_the_experts(tmp_path):
    """Fails when the other rank's scheduler waits for experts that its worker does not have."""
    pytest.importorskip("triton")
    from tiny_models import write_tiny_qwen3_moe

    write_tiny_qwen3_moe(tmp_path / "model", initializer_range=0.3)
    address = f"file://{tmp_path}/ranks"
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(in_own_process, run_rank, rank, address, tmp_path / "model")
            for rank in range(2)
        ]
        (first, wrong), (second, _) = (rank.result(timeout=900) for rank in ranks)
    assert wrong == []
    assert first == [True] * 4
    assert second == [False] * 4
