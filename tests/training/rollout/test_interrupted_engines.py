"""The collector when an engine in its own process is interrupted during a tick."""

import pytest
from fake_engine import FakeEngine
from rollout_runs import Run, Setup, check_drained

INTERRUPTED_STEPS = range(1, 25)


@pytest.mark.parametrize("number", INTERRUPTED_STEPS)
def test_samples_that_finished_in_an_interrupted_tick_are_not_lost(number):
    """Fails when samples that finished in a tick before Ctrl-C are not returned because another
    tick is in progress.
    """
    run = Run(Setup(computes_on=False))
    [engine] = run.fakes.each
    num_steps = 0

    def interrupt(_: FakeEngine, slots: int) -> None:  # noqa: ARG001
        nonlocal num_steps
        num_steps += 1
        if num_steps == number:
            raise KeyboardInterrupt

    engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.steps(5)
    assert run.fakes.generated == run.num_tokens_held()
    run.buffer.check()
    run.steps(3)
    run.drain()
    check_drained(run)
