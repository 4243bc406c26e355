"""Metric values that know how they are reduced, so that means are never averaged unweighted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LARGEST = 1e300  # larger values are counted as this one: their difference would be infinite
_LEAST_RANGE = 1e-9  # of a histogram's values, relative to the largest of them


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, held as Σ value·weight and Σ weight."""

    total: float
    weight: float = 1.0

    def merge(self, other: Mean) -> Mean:
        """Return the mean over both populations."""
        return Mean(self.total + other.total, self.weight + other.weight)

    def read(self) -> float:
        """Return the weighted mean; NaN when the weight is zero."""
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or an amount that adds up."""

    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def read(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))

    def read(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values [B] between edges [B + 1]; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def of(cls, values: ArrayLike, *, num_bins: int = 32) -> Histogram:
        """Count the finite `values` in `num_bins` bins of equal width from the smallest to the
        largest value. A metric must not end a run, but numpy raises when the edges of bins would
        not differ: values that are equal up to rounding get a wider range.
        """
        numbers = np.asarray(values, np.float64)
        numbers = np.clip(numbers[np.isfinite(numbers)], -_LARGEST, _LARGEST)
        low, high = (numbers.min(), numbers.max()) if numbers.size else (0.0, 0.0)
        least = _LEAST_RANGE * max(abs(low), abs(high), 1.0)
        margin = max(0.5, least) if high - low < least else 0.0
        counts, edges = np.histogram(numbers, bins=num_bins, range=(low - margin, high + margin))
        return cls(tuple(edges.tolist()), tuple(counts.tolist()))

    def merge(self, other: Histogram) -> Histogram:
        """Return the counts of both; raise ValueError when their bins differ."""
        if tuple(self.edges) != tuple(other.edges):
            raise ValueError("two histograms with different bins cannot be merged")
        return Histogram(
            self.edges, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        )

    def pair(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return counts and edges, as numpy.histogram does."""
        return np.asarray(self.counts, np.float64), np.asarray(self.edges, np.float64)


Metric = Mean | Sum | Max | Histogram


class Metrics(Mapping[str, Metric]):
    """Named metric values; keys are `stage/quantity` or `stage/quantity_unit`."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Metric | float] | None = None) -> None:
        """Store the values; plain numbers become means of one value."""
        self._values = {
            key: value if isinstance(value, Metric) else Mean(float(value))
            for key, value in (values or {}).items()
        }

    def __getitem__(self, key: str) -> Metric:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        """Return the names, in insertion order."""
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def read(self) -> dict[str, float]:
        """Return the values as plain numbers, without histograms."""
        return {
            key: value.read()
            for key, value in self._values.items()
            if not isinstance(value, Histogram)
        }

    def histograms(self) -> dict[str, Histogram]:
        return {key: v for key, v in self._values.items() if isinstance(v, Histogram)}

    def number(self, key: str) -> float:
        """Return the value of `key` as a plain number."""
        value = self._values[key]
        assert not isinstance(value, Histogram), key
        return value.read()

    def save(self) -> dict[str, list[Any]]:
        """Return the values as plain data, for `restore`."""
        return {
            key: [type(value).__name__, *(getattr(value, name) for name in value.__slots__)]
            for key, value in self._values.items()
        }

    @classmethod
    def restore(cls, state: Mapping[str, Sequence[Any]]) -> Metrics:
        """Return the metrics that were saved as `state`."""
        kinds = {kind.__name__: kind for kind in (Mean, Sum, Max, Histogram)}
        return cls({key: kinds[kind](*numbers) for key, (kind, *numbers) in state.items()})


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Reduce all parts key by key. Raise ValueError when a key has values of two kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, value in part.items():
            known = merged.get(key)
            if known is not None and type(known) is not type(value):
                raise ValueError(
                    f"metric {key} is both a {type(known).__name__} and a "
                    f"{type(value).__name__}; give one of them another name"
                )
            merged[key] = value if known is None else known.merge(value)  # type: ignore[arg-type]
    return Metrics(merged)
