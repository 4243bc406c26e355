"""A run describes its model before anything is started."""

import pytest
from planned_models import sizes_of

from april_rl.start.planning.plan import policy_line


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (None, "policy: 4022.5 million parameters"),
        (16, "policy: 4022.5 million parameters, 33 million trained"),
    ],
)
def test_the_start_shows_total_and_trained_parameters(rank, said):
    assert policy_line(sizes_of("4B", rank=rank)) == said
