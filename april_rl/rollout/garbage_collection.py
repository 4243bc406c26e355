"""Pauses Python's cyclic garbage collector where it would find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Free memory by reference counts alone until the end of the block.

    A rollout makes and frees millions of small objects that form no cycles. The collector would
    look at all of them every time their number has grown by a quarter: 40 % of the controller's
    time with 64 engines. Objects that outlive the block go to the oldest generation, which is
    searched seldom.

    The same holds for imports: without the collector torch, transformers and vLLM load in a fifth
    to a third less time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # moves every object into the oldest generation
            gc.enable()
