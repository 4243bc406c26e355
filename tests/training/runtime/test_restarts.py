"""When a run continues by itself after losing a worker, and when it does not."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from april_rl.errors import EngineStalledError, RunError
from april_rl.run.supervision.failures import WorkerDiedError, WorkerMemoryError, WorkerStalledError
from april_rl.run.supervision.restarts import Restarts


@dataclass
class FakeRun:
    """A run at a policy version, with the checkpoint from which it would continue."""

    version: int
    last_checkpoint: Path | None = Path("run/checkpoints/step_50")


def fail(
    restarts: Restarts, error: BaseException, *, began: int = 0, version: int | None = None
) -> None:
    """A life of a run that begins at one version and ends with `error` at another; `version` None
    means that it was not built.
    """
    with restarts.suppress_failure():
        if version is not None:
            run = FakeRun(began)
            restarts.begin(run)
            run.version = version
        raise error


def make_restarts(most: int) -> Restarts:
    return Restarts(most, resume=None)


@pytest.mark.parametrize("kind", [WorkerDiedError, WorkerStalledError, EngineStalledError])
def test_a_lost_worker_restarts_the_run_with_a_message(capsys, kind):
    """Fails when the reason is swallowed, or the metrics lack the count."""
    restarts = make_restarts(3)
    assert restarts.metrics() == {}
    fail(restarts, kind("worker 0 died"), version=4)
    printed = capsys.readouterr().out
    assert "worker 0 died" in printed
    assert "restart 1 of runtime.max_restarts=3" in printed
    assert restarts.metrics().read()["restart/count"] == 1
    assert restarts.metrics().read()["restart/lost_s"] >= 0


def test_a_run_restarts_at_most_max_restarts_times(capsys):
    """Fails when a run that loses a worker every few steps continues forever."""
    restarts = make_restarts(2)
    fail(restarts, WorkerDiedError("one"), version=1)
    fail(restarts, WorkerDiedError("two"), version=2)
    with pytest.raises(WorkerDiedError, match="three"):
        fail(restarts, WorkerDiedError("three"), version=3)
    assert capsys.readouterr().out.count("restart ") == 2


def test_a_run_without_a_step_between_two_failures_ends():
    """Fails when a fault that recurs at the same position is retried again and again."""
    restarts = make_restarts(3)
    fail(restarts, WorkerDiedError("first"), version=5)
    with pytest.raises(WorkerDiedError, match="again"):
        fail(restarts, WorkerDiedError("again"), began=4, version=4)


def test_a_run_that_made_steps_restarts_even_if_it_failed_earlier_than_before():
    """The checkpoint is at 50, the failures at 53 and then at 52. Fails when the failures are
    compared.
    """
    restarts = make_restarts(3)
    fail(restarts, WorkerDiedError("first"), version=53)
    fail(restarts, WorkerDiedError("second"), began=50, version=52)
    assert restarts.metrics().read()["restart/count"] == 2


def test_a_restart_resumes_from_the_runs_own_last_checkpoint(capsys):
    """`resume=PATH` applies until then. Fails when a restart searches a folder for any checkpoint,
    or starts over although there is a checkpoint.
    """
    restarts, resumed = Restarts(3, resume="other/checkpoints/step_50"), []
    for resume in restarts.lives():
        resumed.append(resume)
        if len(resumed) == 1:
            fail(restarts, WorkerDiedError("lost"), began=50, version=53)
    assert resumed == ["other/checkpoints/step_50", "run/checkpoints/step_50"]
    assert "from run/checkpoints/step_50" in capsys.readouterr().out
    without = make_restarts(3)
    lives = without.lives()
    assert next(lives) is None
    with without.suppress_failure():
        without.begin(FakeRun(3, last_checkpoint=None))
        raise WorkerDiedError("lost")
    assert next(lives) == "auto"
    assert "no checkpoint yet, it starts again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "version"),
    [
        (WorkerMemoryError("no memory"), 4),  # a restart would not add memory
        (RunError("a setting is wrong"), 4),
        (KeyboardInterrupt(), 4),
        (WorkerDiedError("while it was built"), None),
    ],
)
def test_other_errors_do_not_restart_the_run(error, version):
    """Fails when a restart hides an error that would recur, or a person's request to stop."""
    with pytest.raises(type(error)):
        fail(make_restarts(3), error, version=version)
