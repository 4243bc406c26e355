"""The size of Ray's object store follows from the batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from learner_setup import Example, pack

from april_rl.training.runtime import cluster
from april_rl.training.runtime.cluster import object_store_bytes, start_ray

GIB = 1 << 30


def test_two_batches_fit_the_store():
    """512 samples of 16k tokens: with 256 MiB, as before, most of a batch went to disk."""
    assert object_store_bytes(512 * 16_384, available=8 * GIB) >= 2 * 42 * 512 * 16_384


def test_the_store_is_neither_tiny_nor_larger_than_shared_memory():
    assert object_store_bytes(0, available=8 * GIB) == 256 << 20
    assert object_store_bytes(1 << 40, available=GIB) == GIB


def test_a_token_of_a_micro_batch_takes_the_bytes_that_are_reserved():
    """Fails when a field is added to a row but not to the size of the store."""
    size = 1000
    of_one = Example(
        token_ids=tuple(range(size)),
        num_prompt=1,
        behaviour_logprobs=np.zeros(size - 1, np.float32),
        advantage=0.0,
        age=0,
    )
    row = pack([of_one], total=1)
    arrays = [getattr(row, name) for name in row.__slots__]
    held = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert held == cluster.TOKEN_BYTES * size


def test_ray_gets_the_memory_that_the_batch_needs(monkeypatch: pytest.MonkeyPatch):
    """Fails when the number of tokens does not reach Ray."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **settings: asked.update(settings))
    monkeypatch.setattr(cluster.psutil, "disk_usage", lambda _: SimpleNamespace(free=8 * GIB))
    start_ray(num_workers=1, address=None, batch_tokens=10_000_000)
    assert asked["object_store_memory"] == object_store_bytes(10_000_000, available=8 * GIB)
