"""Requests in transit to an engine, and the seed of each."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from april_rl.types import Request, SampleId, Sampling

_FOUR_NUMBERS = Struct("<qqqq")


class Requests(NamedTuple):
    """Requests for one engine, field by field.

    A few lists are cheap to pickle; the worker makes a `Request` of each sample.
    """

    max_response_tokens: int  # budget of a sample over all its requests
    run_seed: int
    prompt_ids: Sequence[int] = ()  # [n]
    indices: Sequence[int] = ()  # of each sample in its group [n]
    # [n][P]; siblings share one tuple, and pickle writes shared objects once.
    prompt_token_ids: Sequence[tuple[int, ...]] = ()
    parts: Sequence[
        tuple[Sequence[int], ...]
    ] = ()  # response tokens of each sample, by completion [n]
    sampling: Sampling | None = None  # for all of them; None: as in training

    def each(self) -> list[Request]:
        """Return a request for each sample, in their order."""
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


def request_seed(run_seed: int, sample_id: SampleId, num_completions: int) -> int:
    """Return a seed in [0, 2^63) that depends on nothing but these four numbers.

    A sample's tokens therefore depend neither on the engine that computes it nor on its neighbours
    in the batch, and a resumed sample does not repeat the random numbers of its first part.
    """
    packed = _FOUR_NUMBERS.pack(run_seed, *sample_id, num_completions)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1
