"""The task that runs of this folder train on."""

from pathlib import Path

import pytest
from command_line import write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and a file of sums, which several tests read."""
    return write_task(tmp_path_factory.mktemp("task"))
