"""Requests as they travel to an engine's worker: in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from april_rl.rollout.seeds import request_seed
from april_rl.types import Request, SampleId, Sampling


class Requests(NamedTuple):
    """Samples that one engine is asked to go on with.

    The controller makes columns where it would make a request for each, and it is the worker that
    draws seeds and counts budgets: with hundreds of engines that is work for all of them.
    """

    max_response_tokens: int  # budget of a sample over all its requests
    run_seed: int
    prompt_ids: Sequence[int] = ()  # of each sample [n]
    indices: Sequence[int] = ()  # of each in its group [n]
    # Of each sample [n][P]; siblings share theirs, and pickle writes what is shared once.
    prompt_token_ids: Sequence[tuple[int, ...]] = ()
    parts: Sequence[tuple[Sequence[int], ...]] = ()  # response tokens by completion, of each [n]
    sampling: Sampling | None = None  # of all of them; None: as in training

    def each(self) -> list[Request]:
        """One for each sample, in their order."""
        samples = zip(self.prompt_ids, self.indices, self.prompt_token_ids, self.parts, strict=True)
        return [
            Request(
                sample_id=(sample_id := SampleId(prompt_id, index)),
                prompt_token_ids=prompt_token_ids,
                start=(start := sum(map(len, parts))),
                max_tokens=self.max_response_tokens - start,
                seed=request_seed(self.run_seed, sample_id, len(parts)),
                parts=parts,
                sampling=self.sampling,
            )
            for prompt_id, index, prompt_token_ids, parts in samples
        ]
