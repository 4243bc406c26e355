"""Which prompt of a set comes next: the built-in samplers, and the protocol for a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

_PRIOR_VALUE = 1 / 6  # mean of p (1 - p) for an unknown pass rate p
_ORDER, _SKIPS = 0, 1  # streams of random bits


class Sampler(Protocol):
    """Chooses prompts of one set by their index. Made as `Class(num_prompts, seed, **args)`."""

    def draw(self) -> int:
        """Return the index of the next prompt, in [0, num_prompts)."""

    def save(self) -> Any:  # noqa: ANN401
        """Return the state as plain data, for a checkpoint."""

    def restore(self, state: Any) -> None:  # noqa: ANN401
        """Continue exactly where `state` was saved."""


@runtime_checkable
class Learns(Protocol):
    """A sampler that is given the rewards of the groups of its prompts."""

    def learn(self, index: int, rewards: Sequence[float]) -> None:
        """Take the rewards [G] of a group as soon as it is scored, even if the filter rejects
        it; called in the order in which groups are scored.
        """


# Makes the sampler of a set from the number of its prompts and the set's name.
NewSampler = Callable[[int, str], Sampler]


class Shuffled:
    """Draws every prompt once an epoch, in a new order each time."""

    def __init__(self, num_prompts: int, seed: int, *, name: str = "") -> None:
        """`name` is the name of the set in a mixture, so that sets of equal size differ."""
        self._num_prompts, self._seed, self._name = num_prompts, seed, name
        self._move_to(epoch=0, cursor=0)

    def draw(self) -> int:
        """Return the next index of the epoch."""
        if self._cursor == self._num_prompts:
            self._move_to(epoch=self._epoch + 1, cursor=0)
        self._cursor += 1
        return int(self._order[self._cursor - 1])

    def save(self) -> dict[str, int]:
        return {"epoch": self._epoch, "cursor": self._cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._move_to(epoch=state["epoch"], cursor=state["cursor"])

    def _move_to(self, *, epoch: int, cursor: int) -> None:
        self._order = np.argsort(self._bits(epoch, _ORDER), kind="stable")
        self._epoch = epoch
        self._cursor = cursor

    def _bits(self, epoch: int, stream: int) -> NDArray[np.uint64]:
        """Return random bits for each place of an epoch [num_prompts].

        They are the raw bits of a bit generator, whose stream numpy keeps stable over versions;
        numpy makes no such promise for `Generator.permutation`.
        """
        entropy = [self._seed, epoch]
        if self._name:
            entropy.append(xxhash.xxh3_64_intdigest(self._name.encode()))
        bits = np.random.Philox(np.random.SeedSequence(entropy, spawn_key=(stream,) * bool(stream)))
        return bits.random_raw(self._num_prompts)


class ByPassRate(Shuffled):
    """`Shuffled`, but prompts whose groups have little signal are often skipped.

    The knowledge of a prompt's pass rate p is a Beta distribution that starts as Beta(1, 1): the
    rewards of its groups, scaled to [0, 1], count as passes, and each epoch since then
    multiplies the counts by `forget`, so that old knowledge fades. A prompt is drawn with the
    probability 6 E[p (1 - p)], the expected variance of its rewards relative to an unknown
    prompt's, at most 1 and at least `least`, so that no prompt is left out for long.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        *,
        name: str = "",
        low: float = 0.0,
        high: float = 1.0,
        forget: float = 0.5,
        least: float = 0.1,
    ) -> None:
        """`low` and `high` are the rewards of a wrong and of a right response."""
        if not (low < high and 0 <= forget <= 1 and 0 < least <= 1):
            raise ValueError("needs low < high, forget in [0, 1] and least in (0, 1]")
        self._low, self._high, self._forget, self._least = low, high, forget, least
        self._known: dict[int, tuple[float, float, int]] = {}  # passes, failures, epoch; by index
        super().__init__(num_prompts, seed, name=name)

    def draw(self) -> int:
        """Return the next index of the epoch that is not skipped."""
        while True:
            index = super().draw()
            if self._thresholds[self._cursor - 1] < self.chance(index):
                return index

    def learn(self, index: int, rewards: Sequence[float]) -> None:
        """Count the rewards [G] as passes and failures of this epoch."""
        passes, failures = self._counts(index)
        scaled = (np.asarray(rewards) - self._low) / (self._high - self._low)
        passed = float(np.clip(scaled, 0.0, 1.0).sum())
        failed = len(rewards) - passed
        self._known[index] = (passes + passed, failures + failed, self._epoch)

    def chance(self, index: int) -> float:
        """Return the probability with which a prompt is drawn in this epoch."""
        passes, failures = self._counts(index)
        a, b = 1 + passes, 1 + failures
        value = a * b / ((a + b) * (a + b + 1))  # E[p (1 - p)] of Beta(a, b)
        return min(1.0, max(self._least, value / _PRIOR_VALUE))

    def save(self) -> dict[str, Any]:
        return {**super().save(), "known": [[i, *counts] for i, counts in self._known.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was saved."""
        super().restore(state)
        self._known = {index: (p, f, epoch) for index, p, f, epoch in state["known"]}

    def _counts(self, index: int) -> tuple[float, float]:
        passes, failures, epoch = self._known.get(index, (0.0, 0.0, self._epoch))
        kept = self._forget ** (self._epoch - epoch)
        return kept * passes, kept * failures

    def _move_to(self, *, epoch: int, cursor: int) -> None:
        super()._move_to(epoch=epoch, cursor=cursor)
        self._thresholds = self._bits(epoch, _SKIPS) / 2.0**64
