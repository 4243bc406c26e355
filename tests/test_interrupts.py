"""Signals: raised once, noted, and held back where nothing may be torn apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from april_rl.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    owner = Interrupts()
    yield owner
    owner.disarm()
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_once_and_is_remembered(interrupts, which):
    """Fails when a swallowed interrupt is forgotten, or a second one disturbs the ending."""
    interrupts.check()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), which)
    os.kill(os.getpid(), which)  # raises no more
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


def test_a_held_signal_raises_only_where_it_is_asked_for(interrupts):
    """Fails when a step is torn apart between two of its books."""
    with interrupts.held():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
