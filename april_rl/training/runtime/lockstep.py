"""Checks that all ranks of one engine sample the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from april_rl.errors import RunError
from april_rl.types import Completion

Fingerprint = tuple[bytes, ...]  # a digest of each completion, in order


def fingerprint(completions: Sequence[Completion]) -> Fingerprint:
    """Return short digests that are equal for the same samples, tokens and finish reasons."""
    return tuple(map(_digest, completions))


def check_lockstep(
    completions: Sequence[Completion], others: Sequence[Fingerprint], *, first_rank: int
) -> None:
    """Raise RunError if a rank after `first_rank`, which made `completions`, sampled others."""
    if not others:
        return  # an engine with one rank need not read every token for its fingerprint
    expected = fingerprint(completions)
    for rank, found in enumerate(others, start=first_rank + 1):
        if found != expected:
            raise RunError(
                f"worker {rank} did not sample the same tokens as worker {first_rank}, though both "
                f"compute one engine: {_first_difference(completions, found)}. Their weights or "
                "their schedules have drifted apart; engine.tensor_parallel_size=1 avoids this"
            )


def _digest(completion: Completion) -> bytes:
    sample = completion.sample_id
    head = (sample.prompt_id, sample.index, completion.start, completion.policy_version)
    found = hashlib.blake2b(np.array(head, dtype=np.int64).tobytes(), digest_size=16)
    found.update(str(completion.finish_reason).encode())
    found.update(np.array(completion.token_ids, dtype=np.int64).tobytes())
    return found.digest()


def _first_difference(completions: Sequence[Completion], found: Fingerprint) -> str:
    for completion, other in zip(completions, found, strict=False):
        if _digest(completion) != other:
            return f"the first difference is in {completion.sample_id}"
    return f"it returned {len(found)} samples instead of {len(completions)}"
