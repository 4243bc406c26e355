"""Steps that are profiled."""

from composed_config import refusal


def test_profiling_steps_that_the_run_does_not_have_is_refused() -> None:
    said = refusal("+recipe=tiny_cpu", "trainer.num_steps=4", "profiler.steps=[0,3,5]")
    assert "profiler.steps=[0, 3, 5] names steps that the run does not have: [0, 5]" in said
