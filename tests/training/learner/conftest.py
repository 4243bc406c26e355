"""Fixtures of most learner tests: a process group and a model folder."""

from collections.abc import Iterator

import pytest
from learner_setup import group_of_one, write_model


@pytest.fixture(scope="module")
def _group() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def either_path(request, tmp_path_factory) -> str:
    """Return the folder of a model with tied embeddings, and of one without."""
    return write_model(tmp_path_factory.mktemp("model"), tied=request.param)
