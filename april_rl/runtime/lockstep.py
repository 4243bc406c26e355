"""Ranks of one engine compared: what they sampled has to be the same, token for token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from april_rl.errors import RunError
from april_rl.types import Completion

Fingerprint = tuple[bytes, ...]  # one of each completion, in their order


class LockstepError(RunError):
    """Two ranks of a tensor-parallel engine sampled different tokens."""


def fingerprint(completions: Sequence[Completion]) -> Fingerprint:
    """Equal for completions of the same samples with the same tokens that ended alike.

    Sixteen bytes a completion, so that what the ranks of an engine say twice costs the controller
    next to nothing.
    """
    return tuple(map(_digest, completions))


def check_lockstep(
    completions: Sequence[Completion], others: Sequence[Fingerprint], *, first_rank: int
) -> None:
    """Raise LockstepError when a rank of an engine sampled something else than its first rank.

    `completions` are those of rank `first_rank`, `others` the fingerprints of the ranks behind it.
    """
    if not others:
        return  # most engines have one rank, and a fingerprint reads every token
    expected = fingerprint(completions)
    for rank, found in enumerate(others, start=first_rank + 1):
        if found != expected:
            raise LockstepError(
                f"worker {rank} did not sample what worker {first_rank} did, though they compute "
                f"one engine (engine.tensor_parallel_size): {_first_difference(completions, found)}"
                ". Their weights or their schedules have drifted apart; "
                "engine.tensor_parallel_size=1 goes without"
            )


def _digest(completion: Completion) -> bytes:
    sample = completion.sample_id
    head = (sample.prompt_id, sample.index, completion.start, completion.policy_version)
    found = hashlib.blake2b(np.array(head, dtype=np.int64).tobytes(), digest_size=16)
    found.update(str(completion.finish_reason).encode())
    found.update(np.array(completion.token_ids, dtype=np.int64).tobytes())
    return found.digest()


def _first_difference(completions: Sequence[Completion], found: Fingerprint) -> str:
    """For the person who has to find out why."""
    for completion, other in zip(completions, found, strict=False):
        if _digest(completion) != other:
            return f"the first difference is in {completion.sample_id}"
    return f"{len(found)} samples came back there, {len(completions)} here"
