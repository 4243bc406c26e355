"""Ray of one's own, whatever the surroundings say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_without_an_address_ray_starts_here_also_where_the_environment_names_a_cluster():
    """RAY_ADDRESS is that of a cluster elsewhere. Fails when Ray is left to follow it."""
    code = (
        "import ray\n"
        "from april_rl.runtime.cluster import start_ray\n"
        "start_ray(num_workers=1, address=None)\n"
        "print(len(ray.nodes()), ray.cluster_resources()['CPU'] >= 1)\n"
        "ray.shutdown()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["1", "True"], done.stderr[-2000:]
