"""A run that is stopped at any moment of its first steps can continue from there."""

from pathlib import Path

import pytest
from test_trainer import evaluated_steps, run, settings
from trainer_fakes import NoInterrupts, rows_of

from april_rl.run.checkpointing.resume import load


class InterruptAt(NoInterrupts):
    """A signal that arrives at the n-th check."""

    reason = "SIGTERM"

    def __init__(self, number: int) -> None:
        self.left = number

    def check(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("has_set", [True, False])
def test_a_run_that_is_stopped_before_its_first_step_ends_can_continue(
    tmp_path: Path, has_set
) -> None:
    """Stopped during the first evaluation or in the first rollout. Fails when the row of step 0 is
    written twice or never.
    """
    held_out = {} if has_set else {"held_out": None}
    config = settings(num_steps=2, every=1)
    looks = 0
    while True:
        looks += 1
        folder = tmp_path / str(looks)
        run(config, folder, interrupts=InterruptAt(looks), **held_out)
        resumed = load("auto", folder)
        assert resumed is not None
        if resumed.manifest.step > 0:
            break
        run(config, folder, resumed=resumed, **held_out)
        assert [row["step"] for row in rows_of(folder)] == [0, 1, 2], looks
        assert evaluated_steps(rows_of(folder)) == ([0, 1, 2] if has_set else [])
    assert looks > 2, "stopped more than once before the first step ended"
