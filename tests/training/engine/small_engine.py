"""A small vLLM engine for tests, with the defaults of the configuration except for its size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april_rl.config.choices import ComputeDtype
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.task.data.stop_tokens import stop_token_ids
from april_rl.training.rollout.requests import Request
from april_rl.types import SampleId

if TYPE_CHECKING:
    from april_rl.training.engine.vllm_engine import VllmEngine

SMALL = {
    "kv_cache_gib": 0.02,
    "dtype": ComputeDtype.float32,
    "gpu_memory_utilization": 0.2,
    "cuda_graphs": False,
}
GUESSES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
SMALL_ARGS = {"max_num_batched_tokens": 1024, "async_scheduling": False}


def small_engine(
    folder: Path | str,
    *,
    max_model_len: int,
    max_num_seqs: int,
    temperature: float = 1.0,
    keeps_parked: bool = False,
    sleeps: bool = True,
    stop_tokens: Sequence[int] | None = None,
    lora: LoraConfig | None = None,
    reports_experts: bool = False,
    args: dict[str, Any] | None = None,
    **settings: Any,
) -> VllmEngine:
    """Start an engine with the model in `folder`; `settings` belong to the section `engine`.

    At its end nothing is searched for garbage, which takes a second and a half among the imports of
    all tests, and the process groups of other engines stay.
    """
    from april_rl.training.engine.vllm_engine import VllmEngine

    engine = VllmEngine(
        EngineConfig(**(SMALL | settings), args=SMALL_ARGS | (args or {})),
        model_path=str(folder),
        seed=0,
        temperature=temperature,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        keeps_parked=keeps_parked,
        sleeps=sleeps,
        stop_tokens=stop_token_ids(str(folder)) if stop_tokens is None else stop_tokens,
        lora=lora,
        reports_experts=reports_experts,
    )
    engine._core._finalizer.detach()
    return engine


def request_of(
    prompt_id: int, prompt: Sequence[int], so_far: Sequence[int] = (), *, budget: int, seed: int
) -> Request:
    """Return a request for the first sample of a prompt, after the tokens `so_far`."""
    return Request(
        sample_id=SampleId(prompt_id, 0),
        prompt_token_ids=prompt,
        parts=(so_far,),
        start=len(so_far),
        max_tokens=budget - len(so_far),
        seed=seed,
    )
