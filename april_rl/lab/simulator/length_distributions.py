"""Distributions of response lengths: how many tokens each response would have without a budget."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from statistics import NormalDist, fmean

from april_rl.types import SampleId

LengthDistribution = Callable[[SampleId], int]

_NORMAL = NormalDist()
_HALVINGS = 60  # halvings of an interval of logarithms, down to the last bit
_OF_THE_PROMPT = -1  # stands for the prompt in place of a sample's index
_NUM_SAMPLED = 1024  # responses that stand for a distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lengths whose logarithms are normal with deviation `sigma` around log(`median_tokens`).

    Samples of one group correlate by `correlation` in [0, 1]: a hard prompt has long responses.
    """

    median_tokens: float
    sigma: float
    correlation: float = 0.0
    seed: int = 0

    def __call__(self, sample_id: SampleId) -> int:
        """Return the length in tokens, at least 1; it depends on the id and the parameters only."""
        own = _NORMAL.inv_cdf(uniform(self.seed, sample_id.prompt_id, sample_id.index))
        shared = _NORMAL.inv_cdf(uniform(self.seed, sample_id.prompt_id, _OF_THE_PROMPT))
        z = math.sqrt(1 - self.correlation) * own + math.sqrt(self.correlation) * shared
        return max(1, round(self.median_tokens * math.exp(self.sigma * z)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The lengths of recorded groups; each prompt gets those of a group drawn with replacement."""

    groups: Sequence[Sequence[int]]  # response tokens of the samples of each group
    seed: int = 0

    def __call__(self, sample_id: SampleId) -> int:
        """Return the length at the sample's index in the group drawn for its prompt; if that
        group was smaller, of a random one of its samples.
        """
        drawn = uniform(self.seed, sample_id.prompt_id, _OF_THE_PROMPT)
        group = self.groups[int(drawn * len(self.groups))]
        if sample_id.index < len(group):
            return group[sample_id.index]
        return group[int(uniform(self.seed, sample_id.prompt_id, sample_id.index) * len(group))]


def sample_lengths(length_of: LengthDistribution, *, cap: int) -> list[int]:
    """Return the tokens of some responses, of at most `cap` tokens each."""
    return [min(cap, length_of(SampleId(prompt_id, 0))) for prompt_id in range(_NUM_SAMPLED)]


def mean_of(length_of: LengthDistribution, *, cap: int) -> float:
    """Return the mean tokens of a response; from some of them, unless all are recorded."""
    if isinstance(length_of, Recorded):
        return fmean(chain.from_iterable(length_of.groups))
    return fmean(sample_lengths(length_of, cap=cap))


def uniform(seed: int, prompt_id: int, index: int) -> float:
    """Return a pseudo-random number in (0, 1) that depends on the arguments only."""
    packed = struct.pack("<qqq", seed, prompt_id, index)
    drawn = int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 11
    return (drawn + 0.5) / 2**53


def capped_mean(median_tokens: float, sigma: float, cap: int) -> float:
    """Return E[min(X, cap)] of a lognormal X: the mean response length in tokens under a budget of
    `cap` tokens.

    The formula is exp(μ + σ²/2)·Φ((log cap - μ - σ²)/σ) + cap·(1 - Φ((log cap - μ)/σ)).
    """
    if sigma == 0:
        return min(median_tokens, cap)
    distance = math.log(cap / median_tokens) / sigma
    below = median_tokens * math.exp(sigma**2 / 2) * _NORMAL.cdf(distance - sigma)
    return below + cap * (1 - _NORMAL.cdf(distance))


def median_for(mean_tokens: float, *, sigma: float, cap: int) -> float:
    """Return the median of the lognormal distribution whose mean is `mean_tokens` under a budget of
    `cap` tokens.

    Raise ValueError unless 1 <= mean_tokens < cap, or if the median is out of the range of floats.
    """
    if not 1 <= mean_tokens < cap:
        raise ValueError(
            f"the mean of responses of at most {cap} tokens must be in [1, {cap}), "
            f"got {mean_tokens:g}"
        )
    low, high = -200.0, math.log(cap) + 200.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if capped_mean(math.exp(middle), sigma, cap) < mean_tokens:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
