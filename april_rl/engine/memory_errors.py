"""Whether an engine could not be built for want of memory, by what vLLM or torch raised."""

from __future__ import annotations

import re

import torch

# torch's allocator on CPU, and its drivers, have no type of their own for it.
_ALLOCATORS = re.compile(r"can't allocate memory|out of memory", re.I)
# What vLLM's checks of weights and KV cache against the device say, each a ValueError.
_CHECKS = re.compile(r"\b(available|free|enough)\b.*\bmemory\b|\bmemory utilization\b", re.I)


def lacks_memory(error: Exception) -> bool:
    """Whether it would have gone well with more memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = _CHECKS if isinstance(error, ValueError) else _ALLOCATORS
    return said.search(str(error)) is not None
