"""vLLM's options: the accepted ones change speed and memory, but not log-probabilities."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from composed_config import refusal
from small_engine import GUESSES, request_of, small_engine
from tiny_models import write_tiny_qwen3
from transformers import AutoModelForCausalLM

from april_rl.config.choices import ComputeDtype, KvCacheDtype, LoraSync
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.training.engine import options
from april_rl.training.engine.device import AcceleratorDevice
from april_rl.training.engine.options import engine_args
from april_rl.training.rollout.ticks import Tick
from april_rl.types import Completion, SampleId

if TYPE_CHECKING:
    from vllm import EngineArgs

NGRAM = "engine.args.speculative_config={method:ngram,num_speculative_tokens:4}"
LOOSE = NGRAM[:-1] + ",rejection_sample_method:synthetic}"
OPEN = {"max_num_batched_tokens", "async_scheduling"}
TEMPERATURE = 0.3
BUDGET, NUM_SAMPLES = 80, 32
PROMPT_TOKENS, BLOCK_TOKENS = 40, 32


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["engine.args.async_scheduling=true", NGRAM],
            "engine.args.async_scheduling=true does not work with engine.args.speculative_config",
        ),
        (["engine.args.async_scheduling=auto"], "async_scheduling must be true or false, got auto"),
        (["engine.args.max_num_batched_tokens=1.5"], "must be a whole number >= 1, got 1.5"),
        (
            ["engine.args.speculative_config={method:eagle}"],
            "with standard rejection, got",
        ),
        ([LOOSE], "with standard rejection, got"),
        ([NGRAM, "deterministic=true"], "engine.args.speculative_config draws"),
        ([NGRAM, "rollout.resume=keep"], "take rollout.resume=reprefill"),
        (
            ["engine.kv_cache_dtype=fp8_e4m3", "algorithm.correction=none"],
            "engine.kv_cache_dtype=fp8_e4m3 samples from another distribution",
        ),
        (["engine.kv_cache_dtype=int4"], "engine.kv_cache_dtype"),
    ],
)
def test_an_option_that_breaks_log_probabilities_is_refused_by_name(overrides, said):
    assert said in refusal("+recipe=tiny_cpu", *overrides)


def arguments(*, lora: LoraConfig | None = None, **settings: Any) -> EngineArgs:
    """Return the options that vLLM gets from an engine's settings on an accelerator."""
    args = {"async_scheduling": False} | settings.pop("args", {})
    config = EngineConfig(**({"dtype": ComputeDtype.bfloat16} | settings), args=args)
    device = AcceleratorDevice(config, sleeps=False)
    sizes = {"max_model_len": 64, "max_num_seqs": 16, "lora": lora}
    return engine_args(config, device, model_path="some/model", seed=0, **sizes)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": ComputeDtype.float32}, {"dtype": "float32"}),
        ({"prefix_caching": False}, {"enable_prefix_caching": False}),
        ({"kv_cache_dtype": KvCacheDtype.fp8_e5m2}, {"kv_cache_dtype": "fp8_e5m2"}),
        ({"args": {"async_scheduling": True}}, {"async_scheduling": True}),
        ({"args": {"speculative_config": GUESSES}}, {"speculative_config": GUESSES}),
        ({"args": {"max_logprobs": 7}}, {"max_logprobs": 7}),
        ({"args": {"max_num_batched_tokens": 32}}, {"max_num_batched_tokens": 32}),
        ({"args": {"max_num_batched_tokens": 8}}, {"max_num_batched_tokens": 16}),  # one of each
        ({"cuda_graphs": False}, {"enforce_eager": True}),
        ({"gpu_memory_utilization": 0.3}, {"gpu_memory_utilization": 0.3}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
    ],
)
def test_a_setting_of_the_engine_reaches_vllm(settings, expected):
    plain, changed = arguments(), arguments(**settings)
    for name, value in expected.items():
        assert getattr(changed, name) == value != getattr(plain, name)


def test_no_option_that_the_run_sets_can_be_given_again(monkeypatch):
    monkeypatch.setattr(options, "EngineArgs", dict)
    for name in {*arguments(lora=LoraConfig(rank=9), tensor_parallel_size=2)} - OPEN:
        with pytest.raises(ValueError, match=f"engine.args.{name}: the run itself sets this"):
            EngineConfig(args={name: 0})


def test_an_adapter_gets_layers_of_the_next_rank_that_vllm_supports():
    assert arguments().enable_lora is False
    found = arguments(lora=LoraConfig(rank=9, sync=LoraSync.adapter))
    assert (found.enable_lora, found.max_loras, found.max_lora_rank) == (True, 1, 16)
    assert found.lora_target_modules is None
    largest = LoraConfig(rank=512, sync=LoraSync.adapter, target_modules=["q_proj", "mlp.up_proj"])
    found = arguments(lora=largest)
    assert (found.max_lora_rank, found.lora_target_modules) == (512, ["q_proj", "up_proj"])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_an_engine_of_several_gpus_reduces_only_with_nccl(tmp_path):
    """vLLM turns its other methods on where a GPU supports them. Fails when one of them
    stays on.
    """
    code = (
        "from april_rl.training.engine.tensor_parallel import parallel_args\n"
        "from vllm import EngineArgs, envs\n"
        f"args = EngineArgs(model={str(tmp_path)!r}, **parallel_args(2))\n"
        "fused = args.compilation_config.pass_config.fuse_allreduce_rms\n"
        "ways = (envs.VLLM_ALLREDUCE_USE_SYMM_MEM, envs.VLLM_ALLREDUCE_USE_FLASHINFER)\n"
        "print(args.disable_custom_all_reduce, fused, *ways)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True False False False"], done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return path


def sample_twice(folder: Path, **settings: Any) -> tuple[Tick, Tick]:
    """Return the completions of an engine with these settings for the same requests, twice."""
    engine = small_engine(
        folder,
        max_model_len=192,
        max_num_seqs=NUM_SAMPLES,
        temperature=TEMPERATURE,
        **({"args": {"max_num_batched_tokens": 256}} | settings),
    )
    requests = [
        request_of(i, prompt_ids(i), budget=BUDGET, seed=1000 + i) for i in range(NUM_SAMPLES)
    ]
    first, second = (engine.advance(requests, slots=NUM_SAMPLES, max_steps=10_000) for _ in "ab")
    assert len(first.finished) == NUM_SAMPLES
    return first, second


def sampled_with_guesses(folder: Path) -> tuple[Tick, Tick]:
    """Sample in the same way with three speculative tokens at a time, in a separate process: vLLM
    drafts with numba, and no second engine can start next to that library.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return sample_twice(folder, args={"max_num_batched_tokens": 256, "speculative_config": GUESSES})


def prompt_ids(index: int) -> tuple[int, ...]:
    """Return more tokens than a block holds: the same four over and over, so that drafts can be
    right.
    """
    return tuple(3 + (7 * index + 5 * (i % 4)) % 90 for i in range(PROMPT_TOKENS))


def distributions(folder: Path, completions: tuple[Completion, ...]) -> Iterator[torch.Tensor]:
    """Return the log-probabilities [R, V] of each response at the temperature, from transformers in
    float32.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for completion in completions:
        prompt = prompt_ids(completion.sample_id.prompt_id)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
        yield (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)


def differences(folder: Path, tick: Tick) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two differences for every sampled token: engine - transformers in nats, and its
    log-probability plus the entropy of its distribution.

    The second is zero on average if tokens have the distribution of the model.
    """
    mismatches, surprises = [], []
    found = distributions(folder, tick.finished)
    for completion, logprobs in zip(tick.finished, found, strict=True):
        tokens = torch.tensor(completion.token_ids)
        mine = logprobs.gather(-1, tokens[:, None])[:, 0]
        mismatches.append(torch.tensor(completion.logprobs) - mine)
        surprises.append(mine - (logprobs.exp() * logprobs).sum(-1))
    return torch.cat(mismatches), torch.cat(surprises)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_speculative_tokens_have_the_distribution_and_logprobs_of_the_model(folder):
    """With several tokens per step, some of them beyond the end of a response or its budget. Fails
    when vLLM's CPU kernel expands the temperatures, when a draft token is accepted unchecked, or
    when log-probabilities after the end are kept.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        first, second = pool.submit(sampled_with_guesses, folder).result()
    assert first.generated_tokens > 1.02 * first.slot_steps, "hardly any draft token was right"
    assert first.generated_tokens == sum(len(c.token_ids) for c in first.finished)
    assert max(len(c.token_ids) for c in first.finished) == BUDGET
    for tick in (first, second):
        mismatches, surprises = differences(folder, tick)
        assert mismatches.abs().mean() < 0.03
        standard_error = surprises.std() / len(surprises) ** 0.5
        assert abs(surprises.mean()) < 4 * standard_error


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_without_prefix_caching_every_prompt_is_computed_each_time(folder):
    every = NUM_SAMPLES * PROMPT_TOKENS
    kept, again = sample_twice(folder)
    rest = NUM_SAMPLES * (PROMPT_TOKENS - BLOCK_TOKENS)
    assert (kept.prefilled_tokens, again.prefilled_tokens) == (every, rest)
    fresh, again = sample_twice(folder, prefix_caching=False)
    assert (fresh.prefilled_tokens, again.prefilled_tokens) == (every, every)
    assert tokens_of(fresh) == tokens_of(kept)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_an_fp8_cache_increases_the_mismatch_with_the_learner(folder):
    """Its tokens have another distribution, so it needs an off-policy correction."""
    exact, _ = sample_twice(folder)
    rounded, _ = sample_twice(folder, kv_cache_dtype=KvCacheDtype.fp8_e4m3)
    off = [differences(folder, tick)[0].abs().mean().item() for tick in (exact, rounded)]
    assert off[0] < 0.03
    assert 2 * off[0] < off[1] < 0.5


def tokens_of(tick: Tick) -> dict[SampleId, Sequence[int]]:
    return {completion.sample_id: completion.token_ids for completion in tick.finished}
