"""When a run goes on by itself after it has lost a worker, and when it does not."""

from __future__ import annotations

import pytest

from april_rl.errors import RunError
from april_rl.restarts import Restarts
from april_rl.rollout.ports import EngineStalledError
from april_rl.runtime.supervision.failures import (
    WorkerDiedError,
    WorkerMemoryError,
    WorkerStalledError,
)


def fail(restarts: Restarts, error: BaseException, *, version: int | None) -> None:
    """A life of a run that ends with `error` at a version; None: before it was built."""
    with restarts.allowed():
        if version is not None:
            restarts.begin(lambda: version)
        raise error


@pytest.mark.parametrize("kind", [WorkerDiedError, WorkerStalledError, EngineStalledError])
def test_a_lost_worker_restarts_the_run_with_a_message(capsys, kind):
    """Fails when the reason is swallowed, or the count is not in the metrics."""
    restarts = Restarts(3)
    assert restarts.metrics() == {}
    fail(restarts, kind("worker 0 died"), version=4)
    printed = capsys.readouterr().out
    assert "worker 0 died" in printed
    assert "restart 1 of runtime.max_restarts=3" in printed
    assert restarts.metrics().read()["restart/count"] == 1
    assert restarts.metrics().read()["restart/lost_s"] >= 0


def test_a_run_restarts_at_most_max_restarts_times(capsys):
    """Fails when a run that loses a worker every few steps goes on for ever."""
    restarts = Restarts(2)
    fail(restarts, WorkerDiedError("one"), version=1)
    fail(restarts, WorkerDiedError("two"), version=2)
    with pytest.raises(WorkerDiedError, match="three"):
        fail(restarts, WorkerDiedError("three"), version=3)
    assert capsys.readouterr().out.count("restart ") == 2


def test_a_run_that_makes_no_step_between_two_failures_ends():
    """Fails when a fault that comes back at the same place is tried again and again."""
    restarts = Restarts(3)
    fail(restarts, WorkerDiedError("first"), version=5)
    with pytest.raises(WorkerDiedError, match="again"):
        fail(restarts, WorkerDiedError("again"), version=5)


@pytest.mark.parametrize(
    ("error", "version"),
    [
        (WorkerMemoryError("no memory"), 4),  # there would be no more of it
        (RunError("a setting is wrong"), 4),
        (KeyboardInterrupt(), 4),
        (WorkerDiedError("while it was built"), None),
    ],
)
def test_other_errors_do_not_restart_the_run(error, version):
    """Fails when a restart hides what would only happen again, or a person who stops the run."""
    with pytest.raises(type(error)):
        fail(Restarts(3), error, version=version)
