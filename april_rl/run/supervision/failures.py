"""Errors of workers, and how to read an error of Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from april_rl.errors import EngineStalledError, RunError


class WorkerDiedError(RunError):
    """A worker failed, or its process ended; the message says which worker, and in which call."""


class WorkerMemoryError(WorkerDiedError):
    """A worker could not allocate memory, or was killed because its machine had none left."""


class WorkerStalledError(EngineStalledError):
    """A worker hangs, and with it its engine and every worker that waits for it."""


# Remedies by the method that ran out of memory.
_MEMORY_ADVICE = {
    "build_learner": "Raise runtime.num_workers, choose a smaller model.path, or set "
    "learner.offload",
    "build_engine": "Lower engine.kv_cache_gib (on CPU) or engine.gpu_memory_utilization (on GPU), "
    "or engine.max_model_len",
    "advance": "Lower engine.kv_cache_gib (on CPU) or engine.gpu_memory_utilization (on GPU), or "
    "engine.max_num_seqs",
    "update": "Lower learner.max_tokens, set learner.activation_checkpointing=true or "
    "learner.offload, or lower engine.kv_cache_gib (on CPU)",
    "sync_weights": "Lower engine.kv_cache_gib (on CPU) or engine.gpu_memory_utilization (on GPU)",
}
_OTHER_MEMORY_ADVICE = (
    "Lower learner.max_tokens or engine.kv_cache_gib, or use a machine with more memory"
)
# Words from the messages of torch's allocators, Ray's memory monitor and libc.
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")

_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # Ray colours its tracebacks for terminals
# Parts of Ray's message about a dead process that do not help: guesses, and its internal names.
_RAY_NOISE = re.compile(
    r" Some common causes include:.*|^\t(class_name|actor_id|namespace): .*\n", re.M
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """Why a call to a worker has no result."""

    message: str  # the worker's traceback, or Ray's message
    summary: str  # one line of it
    is_out_of_memory: bool
    is_death: bool  # whether the process has ended


def read_failure(error: RayError) -> CallFailure:
    """Return why the call failed; raise the RunError itself when the worker raised one."""
    message = _COLOURS.sub("", str(error))
    if not isinstance(error, RayTaskError):
        was_killed = isinstance(error, OutOfMemoryError) or "running low on memory" in message
        is_death = was_killed or isinstance(error, RayActorError)
        message = _RAY_NOISE.sub("", message)
        summary = message.strip().partition("\n")[0]
        return CallFailure(
            message=message, summary=summary, is_out_of_memory=was_killed, is_death=is_death
        )
    if isinstance(error.cause, RunError):
        raise error.cause from None
    summary = f"{type(error.cause).__name__}: {error.cause}"
    is_out_of_memory = isinstance(error.cause, MemoryError) or any(
        words in summary.lower() for words in _MEMORY_WORDS
    )
    return CallFailure(
        message=message, summary=summary, is_out_of_memory=is_out_of_memory, is_death=False
    )


def memory_advice(call: str) -> str:
    return _MEMORY_ADVICE.get(call, _OTHER_MEMORY_ADVICE)
