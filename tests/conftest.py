"""Set-up of every test: one thread, the longest files first, nothing left from the test before."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

import huggingface_hub.constants as hub
import pytest
from cpu_engine_marks import skip_cpu_engine
from hypothesis import settings

from april_rl.config.store import recipes
from april_rl.run.supervision.interrupts import SIGNALS
from april_rl.start.planning.machine import installed_engines

# Threads of torch and vLLM, here and in processes that tests start; torch reads the variable when
# it is imported. With such small matrices, threads would only spin and wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# These take from half a minute to minutes. They start first, the longest before the others, so that
# both cores stay busy.
LONGEST = (
    *("test_runs.py", "test_interrupted_runs.py", "test_one_process.py", "test_python.py"),
    *("test_environment_pool.py", "test_rehearsal.py", "test_environment_runs.py"),
    *("test_evaluate_cli.py", "test_worker_failures.py", "test_config.py"),
    *("test_learner_families.py", "test_learner_lora.py", "test_rewards_sandbox.py"),
)
OFFLINE = os.environ.get("HF_HUB_OFFLINE"), hub.HF_HUB_OFFLINE  # as set before any test
FREEZE, UNFREEZE = gc.freeze, gc.unfreeze  # Python's own
SLOW_S = 2.0  # CPU time: a test that takes more needs the marker `slow`

# On a busy machine any example may be slow once; tests that are always slow appear in the
# durations.
settings.register_profile("april_rl", deadline=None)
settings.load_profile("april_rl")

# Collecting imports torch, transformers and vLLM. Python would search their millions of objects for
# reference cycles again and again, which takes a quarter of the time.
gc.disable()
# Let Python free them at its end, because nanobind lists what is left. pytest's own searches at
# the end of the tests, of two seconds each, still leave them out.
atexit.register(gc.unfreeze)


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
    place = {name: n for n, name in enumerate(LONGEST)}
    last = len(LONGEST)
    items.sort(key=lambda item: (place.get(item.path.name, last), item.path not in slow))
    skip_cpu_engine(items, installed=installed_engines())


@pytest.fixture(autouse=True)
def only_the_recipes_of_the_package() -> Iterator[None]:
    """Forget the recipes that a test registers."""
    before = dict(recipes())
    yield
    recipes().clear()
    recipes().update(before)


def pytest_collection_finish() -> None:
    """Turn the garbage collector on again, and leave the imports out of its searches for good.

    vLLM asks for three full searches when an engine ends, after it has brought all objects back
    (`gc.unfreeze`), as every rollout does. With the imports, each takes half a second.
    """
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()


@pytest.fixture
def _imports_may_be_searched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test freeze and unfreeze objects; leave the imports out of searches again after it."""
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    yield
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record the CPU time of each test and of the processes that it started and that have ended."""
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", sum(os.times()[:4]) - before))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that should have the marker `slow`."""
    for report in terminalreporter.getreports("passed"):
        cpu_s = dict(report.user_properties).get("cpu_s", 0.0)
        if report.when == "call" and cpu_s > SLOW_S and "slow" not in report.keywords:
            terminalreporter.write_line(f"not marked slow: {cpu_s:.1f} s of CPU, {report.nodeid}")


def pytest_keyboard_interrupt() -> None:
    """Stop the timer of a run in this process, which would end the process before the summary."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


@pytest.fixture(autouse=True)
def _hub_as_before() -> Iterator[None]:
    """Restore the offline flags of the hub, which a start sets if the hub is unreachable.

    A module's fixture may set them before the first test of the module.
    """
    yield
    variable, hub.HF_HUB_OFFLINE = OFFLINE
    if variable is None:
        os.environ.pop("HF_HUB_OFFLINE", None)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Restore what `Interrupts` replaces.

    A command that a test runs in this process leaves its handlers behind, and Ctrl-C would then
    start the timer of a run that ended long ago.
    """
    before, hook = {which: signal.getsignal(which) for which in SIGNALS}, sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.fixture(autouse=True, scope="module")
def _end_process_groups() -> Iterator[None]:
    """Destroy the process group that vLLM keeps after its engine, because the next module makes its
    own.
    """
    yield
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
