"""Partial rollouts under TRL in runs that are killed or interrupted, or whose reward fails."""

import pytest
from trl_runs import WITH_TRL, batches_of, check_every_row_once, launch, run, steps_of

pytestmark = WITH_TRL
KILLED = -9


def test_a_run_that_is_killed_twice_loses_no_row(tmp_path):
    """Fails when a checkpoint with all of TRL's files lacks ours, or forgets the batch that is half
    trained.
    """
    settings = {
        "over_sampling_factor": 1.5,
        "steps": 10,
        "grpo": {"steps_per_generation": 4, "save_steps": 3},  # a batch lasts two steps
    }
    assert launch(tmp_path, fault=["kill_in_save", 3], **settings) == KILLED
    assert launch(tmp_path, fault=["kill", 3], resume=True, **settings) == KILLED
    again = run(tmp_path, resume=True, **settings)
    assert [step["step"] for step in steps_of(again)] == list(range(1, 11))
    first, halved, whole, second_halved, second_whole, *others = batches_of(tmp_path)
    assert whole == halved, "TRL's files at step 3, in the middle of a batch"
    assert second_whole == second_halved, "killed after step 7, resumed from step 6"
    assert len(others) == 1
    trained = [first, whole, second_whole, *others]
    check_every_row_once(trained, tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (["raise", 4], "this reward cannot read the answer"),
        (["interrupt_engine", 150], "interrupt_engine"),
        (["interrupt_update", 8], "interrupt_update"),  # the second half of step 4
    ],
)
def test_after_an_error_the_same_trainer_resumes(fault, message, tmp_path):
    """Fails when the user does not see the error, the engine continues with lost samples, or TRL
    continues in the batch that was interrupted.
    """
    found = run(tmp_path, steps=6, over_sampling_factor=1.5, fault=fault)
    error, num_trained = found["raised"]
    assert error == message
    assert num_trained >= 2
    assert [step["step"] for step in steps_of(found)] == [1, 2, 3, 4, 5, 6]
    batches = batches_of(tmp_path)
    num_saved = num_trained // 2 * 2
    trained = [*batches[:num_saved], *batches[num_saved - 6 :]]
    check_every_row_once(trained, tmp_path / "checkpoint-6")
