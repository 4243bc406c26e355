"""Where a request's seed comes from."""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

from april_rl.types import SampleId

_FOUR_NUMBERS = Struct("<qqqq")


def request_seed(run_seed: int, sample_id: SampleId, num_completions: int) -> int:
    """A seed in [0, 2^63) that is a function of these four numbers alone.

    So a sample's tokens depend on neither the engine that computes it nor its neighbours in the
    batch, and a resumed sample does not draw the numbers of its first part again.
    """
    packed = _FOUR_NUMBERS.pack(run_seed, *sample_id, num_completions)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1
