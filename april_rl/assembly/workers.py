"""Build the workers from a checked configuration, and check that the machine suffices."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from april_rl.assembly.collector import num_slots
from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import has_chat
from april_rl.data.stop_tokens import stop_token_ids
from april_rl.errors import RunError
from april_rl.evaluation.settings import longest_response
from april_rl.runtime.cluster import TOKEN_BYTES
from april_rl.runtime.layout import Layout
from april_rl.runtime.preflight import check_start
from april_rl.runtime.worker_parts import WorkerSettings
from april_rl.runtime.workers import Workers
from april_rl.supervision.watchdog import Watchdog


class EngineSizes(NamedTuple):
    """Batch size and context length of one engine."""

    max_num_seqs: int  # requests computed together, at most
    max_model_len: int  # tokens of a prompt and its response, at most


def context_length(config: TrainConfig, *, is_training: bool = True) -> tuple[int, str]:
    """Return the largest number of tokens of a prompt and its response, and the setting that sets
    it.

    With `is_training` false, only the evaluation sets count. Raise RunError when
    engine.max_model_len is less than training or an evaluation needs.
    """
    budget, key = longest_response(config, is_training=is_training)
    longest, key = config.data.max_prompt_tokens + budget, f"data.max_prompt_tokens + {key}"
    if config.observation_tokens:
        longest += config.observation_tokens
        key += " + environment.max_observation_tokens"
    given = config.engine.max_model_len
    if 0 < given < longest:
        raise RunError(f"engine.max_model_len must be 0 or >= {key} = {longest}, got {given}")
    return (given, "engine.max_model_len") if given else (longest, key)


def check_machine(config: TrainConfig, layout: Layout, *, is_training: bool = True) -> None:
    """Check that the model and the machine suffice.

    With `is_training` false, no learner is planned for. Raise RunError when something does not fit.
    """
    window_tokens, window_key = context_length(config, is_training=is_training)
    check_start(
        model_path=config.model.path,
        device=layout.device,
        num_workers=layout.num_workers,
        is_cluster=config.runtime.ray_address is not None,
        tensor_parallel_size=layout.tensor_parallel_size,
        window_tokens=window_tokens,
        window_key=window_key,
        batch_bytes=TOKEN_BYTES * _batch_tokens(config, window_tokens) if is_training else 0,
    )


def training_sizes(config: TrainConfig, layout: Layout) -> EngineSizes:
    """Return the sizes that each engine needs for training and its evaluations.

    Raise RunError when engine.max_num_seqs is less than training has in flight.
    """
    slots = math.ceil(num_slots(config) / layout.num_engines)
    if 0 < config.engine.max_num_seqs < slots:
        raise RunError(
            f"engine.max_num_seqs={config.engine.max_num_seqs} is less than the {slots} samples "
            "that rollout.over_sampling_factor · trainer.num_groups · rollout.group_size puts in "
            "flight on each engine: set it to 0 (automatic), or lower one of these"
        )
    return EngineSizes(config.engine.max_num_seqs or slots, context_length(config)[0])


def build_workers(
    config: TrainConfig, layout: Layout, *, run_dir: Path, sizes: EngineSizes
) -> Workers:
    """Return the workers, with a watchdog that writes its report to the run directory."""
    watchdog = Watchdog(
        report=run_dir.resolve() / "stall_report.txt",
        stall_timeout_s=config.runtime.stall_timeout_s,
        call_timeout_s=6 * config.runtime.stall_timeout_s,
    )
    return Workers(
        layout,
        settings=_worker_settings(config, layout, sizes),
        address=config.runtime.ray_address,
        watchdog=watchdog,
        batch_tokens=_batch_tokens(config, sizes.max_model_len),
    )


def _worker_settings(config: TrainConfig, layout: Layout, sizes: EngineSizes) -> WorkerSettings:
    threads = config.runtime.threads or max(1, (os.cpu_count() or 1) // layout.num_workers)
    is_chat = has_chat(config.data, config.evaluation.sets)
    return WorkerSettings(
        config=config,
        device=layout.device,
        threads=threads if layout.device == "cpu" else 0,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        stop_tokens=tuple(stop_token_ids(config.model.path, is_chat=is_chat)),
    )


def _batch_tokens(config: TrainConfig, max_model_len: int) -> int:
    """Return the largest number of prompt and response tokens that a step trains."""
    return config.trainer.num_groups * config.rollout.group_size * max_model_len
