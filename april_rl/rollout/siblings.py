"""Requests for samples of one prompt as they travel to an engine's worker: what they share is said
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from april_rl.rollout.seeds import request_seed
from april_rl.types import Request, SampleId


class Siblings(NamedTuple):
    """Samples of one prompt that one engine is asked to go on with.

    The controller makes one for a group where it would make G requests, and it is the worker that
    draws seeds and counts budgets: with hundreds of engines that is work for all of them.
    """

    prompt_id: int
    prompt_token_ids: tuple[int, ...]  # [P]
    indices: list[int]  # of the samples, [n]
    parts: list[tuple[Sequence[int], ...]]  # response tokens by completion, of each sample [n]
    max_response_tokens: int  # budget of a sample over all its requests
    run_seed: int

    def requests(self) -> list[Request]:
        """One for each sample, in their order."""
        return [
            Request(
                sample_id=(sample_id := SampleId(self.prompt_id, index)),
                prompt_token_ids=self.prompt_token_ids,
                start=(start := sum(map(len, parts))),
                max_tokens=self.max_response_tokens - start,
                seed=request_seed(self.run_seed, sample_id, len(parts)),
                parts=parts,
            )
            for index, parts in zip(self.indices, self.parts, strict=True)
        ]


def requests_of(submit: Iterable[Siblings]) -> list[Request]:
    """All of them as an engine takes them."""
    return [request for siblings in submit for request in siblings.requests()]
