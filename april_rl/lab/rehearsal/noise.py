"""A reward for models that know nothing: it differs between responses at random."""

from __future__ import annotations


def even_sum(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:  # noqa: ARG001
    """Return 1.0 for each response whose bytes have an even sum, else 0.0."""
    return [float(sum(response.encode()) % 2 == 0) for response in responses]
