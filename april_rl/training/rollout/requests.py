"""Requests to an engine, many in transit, and the seed of each."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from struct import Struct
from typing import NamedTuple

from april_rl.types import SampleId

Parts = tuple[Sequence[int], ...]  # tokens of a sample after its prompt, by span

_FOUR_NUMBERS = Struct("<qqqq")


class Sampling(NamedTuple):
    """Sampling parameters of a request that differ from training."""

    temperature: float
    top_p: float  # nucleus sampling (Holtzman et al. 2020); 1 draws from all tokens


class Request(NamedTuple):
    """Request to an engine: continue `token_ids` for at most `max_tokens` tokens."""

    sample_id: SampleId
    prompt_token_ids: tuple[int, ...]  # [P]
    start: int  # tokens of the sample after its prompt
    max_tokens: int  # what remains of the response budget, or of the turn's limit
    seed: int
    parts: Parts = ()  # [start] tokens in total
    sampling: Sampling | None = None  # None: the engine's temperature and all tokens
    context_start: int = 0  # where the policy begins to read, in prompt and parts together
    stop: tuple[str, ...] = ()  # texts that end the turn
    num_routed: int = 0  # how many of the first tokens that the policy reads have known experts

    @property
    def token_ids(self) -> list[int]:
        """Return what the policy reads [P + start - context_start] as a new list."""
        return list(chain(self.prompt_token_ids, *self.parts))[self.context_start :]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the policy reads, P + start - context_start."""
        return len(self.prompt_token_ids) + self.start - self.context_start


class Requests(NamedTuple):
    """Requests for one engine, as one list per field, because a few lists are cheap to pickle."""

    run_seed: int
    prompt_ids: Sequence[int] = ()  # [n]
    indices: Sequence[int] = ()  # index of each sample in its group [n]
    # [n][P]; siblings share one tuple, and pickle writes shared objects once.
    prompt_token_ids: Sequence[tuple[int, ...]] = ()
    max_tokens: Sequence[int] = ()  # tokens that each sample may still get [n]
    parts: Sequence[Parts] = ()  # [n]
    is_known: Sequence[bool] = ()  # whether the worker adds the parts [n]; empty: it adds none
    context_starts: Sequence[int] = ()  # where the policy begins to read [n]; empty: all 0
    stops: Sequence[tuple[str, ...]] = ()  # texts that end the turn of each sample [n]; empty: none
    num_routed: Sequence[int] = ()  # number of first tokens with known experts [n]; empty: all 0
    sampling: Sampling | None = None  # sampling of all requests; None: as in training

    @property
    def sample_ids(self) -> list[SampleId]:
        return list(map(SampleId, self.prompt_ids, self.indices))

    def each(self) -> list[Request]:
        """Return a request for each sample, in their order."""
        samples = zip(
            self.sample_ids,
            self.prompt_token_ids,
            self.max_tokens,
            self.parts,
            self.context_starts or [0] * len(self.parts),
            self.stops or [()] * len(self.parts),
            self.num_routed or [0] * len(self.parts),
            strict=True,
        )
        return [
            Request(
                sample_id=sample_id,
                prompt_token_ids=prompt_token_ids,
                start=sum(map(len, parts)),
                max_tokens=limit,
                seed=request_seed(self.run_seed, sample_id, len(parts)),
                parts=parts,
                sampling=self.sampling,
                context_start=context_start,
                stop=stop,
                num_routed=routed,
            )
            for sample_id, prompt_token_ids, limit, parts, context_start, stop, routed in samples
        ]


def request_seed(run_seed: int, sample_id: SampleId, num_spans: int) -> int:
    """Return a seed in [0, 2^63) that depends on nothing but these four numbers.

    A sample's tokens therefore depend neither on the engine that computes it nor on its neighbours
    in the batch, and a resumed sample does not repeat the random numbers of its first part.
    """
    packed = _FOUR_NUMBERS.pack(run_seed, *sample_id, num_spans)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1
