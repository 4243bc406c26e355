"""Python's search for reference cycles, put off while there are none to be found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cycle_search_put_off() -> Iterator[None]:
    """Memory is freed by reference counts alone until the end; then it is as it was before.

    A rollout makes and frees millions of small objects that form no cycles. The search would look
    at all of them every time their number has grown by a quarter: 40 % of the controller's time
    with 64 engines.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
