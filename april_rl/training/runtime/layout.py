"""Number and device of the workers and their engines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Number and device of the workers; rank r belongs to engine r // tensor_parallel_size."""

    device: str  # cpu or cuda (torch calls ROCm devices cuda too)
    num_workers: int
    tensor_parallel_size: int  # workers of one engine

    def __post_init__(self) -> None:
        assert self.num_workers % self.tensor_parallel_size == 0, self

    @property
    def num_engines(self) -> int:
        """Return how many engines sample independently of each other."""
        return self.num_workers // self.tensor_parallel_size

    def __str__(self) -> str:
        each = f" of {self.tensor_parallel_size} workers" if self.tensor_parallel_size > 1 else ""
        engines = f"{self.num_engines} engine{'s' if self.num_engines > 1 else ''}{each}"
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        return f"{workers} on {self.device}, {engines}"
