"""What a run says of its model once the workers have loaded it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from april_rl.assembly.run import _start


class LoadedWorkers:
    """They have started; of the model they know how large it is and how much of it is trained."""

    def __init__(self, num_parameters: int, num_trained: int) -> None:
        self._counts = num_parameters, num_trained

    def start(self, on_stage: Callable[[str], None], *, engines_sleep: bool) -> tuple[int, int]:
        self.engines_sleep = engines_sleep
        on_stage("loading the learner")
        on_stage("starting vLLM")
        return self._counts


class Screen:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.messages: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((523_456, 523_456), "policy: 0.5 million parameters"),
        ((4_022_468_096, 33_030_144), "policy: 4022.5 million parameters, 33 million trained"),
        ((523_456, 36_864), "policy: 0.5 million parameters, 0.0369 million trained"),
    ],
)
def test_the_start_shows_total_and_trained_parameters(counts, said):
    screen = Screen()
    workers = LoadedWorkers(*counts)
    _start(workers, screen, engines_sleep=False)
    assert not workers.engines_sleep
    assert screen.phases == ["loading the learner", "starting vLLM"]
    assert screen.messages == [said]
