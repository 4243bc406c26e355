"""Decoders for the tests of the reward pool, quick to load: a token id is a code point."""

from __future__ import annotations

import os


def characters(token_ids):
    return "".join(map(chr, token_ids))


def printable(token_ids):
    """Return the text; raise for a character below a space."""
    low = [token_id for token_id in token_ids if token_id < 32]
    if low:
        raise ValueError(f"no such token: {low[0]}")
    return characters(token_ids)


def process_id(token_ids):  # noqa: ARG001 - a decoder has this argument
    return str(os.getpid())


class NeverLoads:
    """A decoder that can be pickled and not unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise OSError("the vocabulary is gone")
