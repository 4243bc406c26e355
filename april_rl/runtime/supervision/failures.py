"""What comes of calls to workers: results, or a failure in the words of this project."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from april_rl.errors import RunError
from april_rl.rollout.ports import EngineStalledError


class WorkerDiedError(RunError):
    """A worker failed, or its process ended; the message says which one, and in what."""


class WorkerMemoryError(WorkerDiedError):
    """A worker did not get the memory it asked for, or was killed for what it had."""


class HeadLostError(RunError):
    """Ray's head process has ended, and its cluster with it; the message says what to do."""


class WorkerStalledError(EngineStalledError):
    """A worker hangs; so does its engine, and every worker that waits for it."""


# By the method that ran out of memory.
_ADVICE = {
    "build_learner": "Give runtime.num_workers more of them, take a smaller model.path, or set "
    "learner.offload",
    "build_engine": "Lower engine.kv_cache_gib (on CPU) or engine.gpu_memory_utilization (on GPU), "
    "or engine.max_model_len",
    "advance": "Lower engine.kv_cache_gib (on CPU) or engine.gpu_memory_utilization (on GPU), or "
    "engine.max_num_seqs",
    "update": "Lower learner.max_tokens, set learner.activation_checkpointing=true or "
    "learner.offload, or lower engine.kv_cache_gib (on CPU)",
    "sync_weights": "Lower engine.kv_cache_gib (on CPU) or engine.gpu_memory_utilization (on GPU)",
}
_ANY_ADVICE = "Lower learner.max_tokens or engine.kv_cache_gib, or use a machine with more memory"
# What torch's allocators, Ray's memory monitor and libc say.
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")

_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # Ray's tracebacks are made for terminals
# Of what Ray says of a death: its guesses, and names that only it knows.
_GUESSES = re.compile(
    r" Some common causes include:.*|^\t(class_name|actor_id|namespace): .*\n", re.M
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a call has no result."""

    message: str  # the worker's own traceback, or what Ray knows
    summary: str  # in a line
    is_memory: bool
    is_death: bool  # of the process


def failure_of(error: RayError) -> Failure:
    """What `error` says; a RunError that the worker raised is raised as it is."""
    message = _COLOURS.sub("", str(error))
    if not isinstance(error, RayTaskError):
        was_killed = isinstance(error, OutOfMemoryError) or "running low on memory" in message
        is_death = was_killed or isinstance(error, RayActorError)
        message = _GUESSES.sub("", message)
        summary = message.strip().partition("\n")[0]
        return Failure(message=message, summary=summary, is_memory=was_killed, is_death=is_death)
    if isinstance(error.cause, RunError):
        raise error.cause from None
    said = f"{type(error.cause).__name__}: {error.cause}"
    is_memory = isinstance(error.cause, MemoryError) or any(
        word in said.lower() for word in _MEMORY_WORDS
    )
    return Failure(message=message, summary=said, is_memory=is_memory, is_death=False)


def memory_advice(call: str) -> str:
    """The settings that make `call` (a method of the worker) need less memory."""
    return _ADVICE.get(call, _ANY_ADVICE)
