"""Trackers show the steps that a resumed run repeats."""

from small_tracker import make_tracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from april_rl.config.choices import TrackingBackend
from april_rl.metrics import Metrics

TENSORBOARD = [TrackingBackend.tensorboard]


def test_tensorboard_shows_each_step_with_the_numbers_of_the_resumed_branch(tmp_path):
    for steps, first_step, mean in ((range(5), None, 0.25), (range(3, 5), 3, 0.75)):
        with make_tracker(
            tmp_path, backends=[TrackingBackend.tensorboard], first_step=first_step
        ) as tracker:
            for step in steps:
                tracker.log(step, Metrics({"reward/mean": mean}))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75)]
