"""Agents that the tests of a file share, because their process takes long to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agent_episodes import agents, question

from april_rl.task.environments.pool import EnvironmentPool


@pytest.fixture(scope="module")
def agents_of_a_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    with agents(tmp_path_factory.mktemp("agents")) as pool:
        yield pool


@pytest.fixture
def usual_agents(agents_of_a_module: EnvironmentPool) -> Iterator[EnvironmentPool]:
    """Return agents with the usual settings; what a test leaves in progress ends with it."""
    yield agents_of_a_module
    agents_of_a_module.forget(question("").id)
