"""Metric values that know how they are reduced, so that there is never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mean:
    """Σ value·weight and Σ weight; reads as their quotient."""

    total: float
    weight: float = 1.0

    def merged(self, other: Mean) -> Mean:
        """Both populations together."""
        return Mean(self.total + other.total, self.weight + other.weight)

    def read(self) -> float:
        """The weighted mean; NaN of nothing."""
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or an amount."""

    total: float

    def merged(self, other: Sum) -> Sum:
        """Both amounts together."""
        return Sum(self.total + other.total)

    def read(self) -> float:
        """The amount."""
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen."""

    value: float

    def merged(self, other: Max) -> Max:
        """The larger one."""
        return Max(max(self.value, other.value))

    def read(self) -> float:
        """The value."""
        return self.value


Metric = Mean | Sum | Max


class Metrics(Mapping[str, Metric]):
    """Named metric values; `stage/quantity` or `stage/quantity_unit` as keys."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Metric | float] | None = None) -> None:
        """Plain numbers become means of one value."""
        self._values = {
            key: value if isinstance(value, (Mean, Sum, Max)) else Mean(float(value))
            for key, value in (values or {}).items()
        }

    def __getitem__(self, key: str) -> Metric:
        """The metric of that name."""
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        """The names, in the order they were given."""
        return iter(self._values)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._values)

    def read(self) -> dict[str, float]:
        """The plain numbers."""
        return {key: value.read() for key, value in self._values.items()}

    def save(self) -> dict[str, list[str | float]]:
        """Return the values as plain data, for `restore`."""
        return {
            key: [type(value).__name__, *(getattr(value, name) for name in value.__slots__)]
            for key, value in self._values.items()
        }

    @classmethod
    def restore(cls, state: Mapping[str, Sequence[Any]]) -> Metrics:
        """Return the metrics that were saved as `state`."""
        kinds = {kind.__name__: kind for kind in (Mean, Sum, Max)}
        return cls({key: kinds[kind](*numbers) for key, (kind, *numbers) in state.items()})


def merge(parts: Iterable[Metrics]) -> Metrics:
    """All parts reduced key by key; a key with two kinds of value is an error."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, value in part.items():
            known = merged.get(key)
            if known is not None and type(known) is not type(value):
                raise ValueError(
                    f"metric {key} is a {type(known).__name__} here, a {type(value).__name__} there"
                )
            merged[key] = value if known is None else known.merged(value)  # type: ignore[arg-type]
    return Metrics(merged)
