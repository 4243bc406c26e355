"""The start reports when agents cannot open the files that they need."""

import pytest

from april_rl.config import TrainConfig
from april_rl.start.assembly import environments
from april_rl.task.environments.loading import Description


@pytest.mark.parametrize(("num_episodes", "is_said"), [(100, False), (1000, True)])
def test_too_few_open_files_for_the_agents_are_reported_at_the_start(
    num_episodes: int, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "raise_open_files", lambda: 1024)
    config, agent = TrainConfig(), Description(is_agent=True)
    lines = list(environments.open_files_line(config, agent, num_episodes=num_episodes))
    assert [
        "1000 agents in 2 processes need about 3000 open files in each, and the system allows 1024"
        in line
        for line in lines
    ] == [True] * is_said
