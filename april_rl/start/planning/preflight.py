"""Refuses a run that cannot start, before any process is started. One message lists everything that
the machine, the engine build and the model lack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedConfig

from april_rl.config import TrainConfig
from april_rl.config.choices import RouterReplay
from april_rl.errors import PreflightError
from april_rl.start.planning.machine import Machine, wrong_engine, wrong_tools
from april_rl.start.planning.model import max_context_tokens, num_heads, read_model
from april_rl.start.planning.sizes import batch_tokens, context_length
from april_rl.training.batch.packing import TOKEN_BYTES
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.runtime.layout import Layout

_GIB = 1 << 30
# Weights that vLLM copies outside the loaders that a weight sync uses (its models/gpt_oss.py).
_NEVER_NEW = {"gpt_oss": "attention sinks and experts"}


def check_start(
    config: TrainConfig, layout: Layout, machine: Machine, *, is_training: bool = True
) -> PreTrainedConfig:
    """Return the model's config.json if the run can start. With `is_training` false, only the
    engines' part counts.

    Raise PreflightError with all that is missing; RunError when engine.max_model_len is too small.
    """
    context_tokens, context_key = context_length(config, is_training=is_training)
    missing = [*_too_small(layout, machine)]
    missing += _unknown_options(config.engine.args)
    missing += wrong_engine(layout.device, installed=machine.engines)
    if layout.device == "cuda" and machine.num_local_gpus:
        missing += wrong_tools()
    if is_training:
        missing += _batch_too_large(TOKEN_BYTES * batch_tokens(config, context_tokens), machine)
    try:
        model = read_model(config.model.path)
    except PreflightError as error:
        raise _cannot_start([*missing, f"model: {error}"]) from error
    if context_tokens > (most := max_context_tokens(model)):
        missing.append(
            f"context length: {context_key} = {context_tokens} exceeds the model's maximum, "
            f"{most} tokens"
        )
    if (heads := num_heads(model)) % layout.tensor_parallel_size:
        missing.append(
            f"heads: engine.tensor_parallel_size={layout.tensor_parallel_size} does not divide the "
            f"model's {heads} attention heads"
        )
    if missing:
        raise _cannot_start(missing)
    return model


def _cannot_start(missing: list[str]) -> PreflightError:
    lines = "\n".join(f"  - {line}" for line in missing)
    return PreflightError(f"this run cannot start here:\n{lines}")


def _unknown_options(names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each option that vLLM's source lacks; importing it would take seconds."""
    found = find_spec("vllm")
    if found is not None and found.origin is not None:
        source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text("utf-8")
        fields = source.partition("class EngineArgs:")[2].partition("    def ")[0]
        known = re.findall(r"^    (\w+): ", fields, re.MULTILINE)
        for name in sorted(set(names) - set(known)):
            yield f"engine.args.{name}: the installed vLLM has no such option; remove it"


def _too_small(layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield a message when there are more workers than GPUs, or more than cores, because workers
    would have to share a core.
    """
    workers = layout.num_workers
    if layout.device == "cuda" and machine.num_gpus < workers:
        yield (
            f"GPUs: runtime.num_workers={workers} needs {workers} GPUs; {machine.name} has "
            f"{machine.num_gpus}"
        )
    if layout.device == "cpu" and not machine.is_cluster and machine.num_cores < workers:
        yield (
            f"cores: runtime.num_workers={workers} needs {workers} cores; this machine has "
            f"{machine.num_cores}: lower it, or join several machines (docs/gpu.md)"
        )


def _batch_too_large(num_bytes: int, machine: Machine) -> Iterator[str]:
    """Yield a message when this machine's free memory does not hold the batch of a step."""
    if num_bytes > machine.free_bytes:
        yield (
            "batch: trainer.num_groups · rollout.group_size samples of full length need "
            f"{num_bytes / _GIB:,.0f} GiB; this machine has {machine.free_bytes / _GIB:.0f} GiB "
            "free: lower one of the two"
        )


def check_engine_takes(model: ModelSizes, *, prefix_caching: bool, is_training: bool) -> None:
    """Raise PreflightError where vLLM 0.32 samples wrongly from a model, or fails after a while."""
    kind = model.model_type
    if is_training and kind in _NEVER_NEW:
        raise PreflightError(
            f"model.path: model_type {kind} cannot be trained: vLLM 0.32 keeps its first "
            f"{_NEVER_NEW[kind]} when new weights are sent. It can be evaluated"
        )
    if model.has_states and prefix_caching:
        raise PreflightError(
            f"engine.prefix_caching=true: model_type {kind} has layers that carry a state, which "
            "vLLM's prefix cache does not support everywhere; set engine.prefix_caching=false"
        )


def check_router_replay(model: ModelSizes, replay: RouterReplay) -> None:
    """Raise PreflightError when the learner should repeat the experts of a model in which it knows
    no router.
    """
    if model.has_known_routers or not replay.is_on:
        return
    raise PreflightError(
        f"learner.router_replay={replay.value}: model_type {model.model_type} has no router whose "
        "choices the learner can repeat (docs/usage.md names the families); remove it"
    )
