"""Wait until a Ray cluster has a number of nodes: python tools/cluster/await_nodes.py HOST:PORT
NODES.

Exit status 1 and one line when it has fewer after five minutes, or after the seconds of a third
argument. The machine must be a node of the cluster.
"""

from __future__ import annotations

import sys
import time

import ray

from april_rl.training.runtime.cluster import JoinError, join

_TIMEOUT_S = 300.0
_PAUSE_S = 0.5


def _names(address: str) -> list[str]:
    """Return the host names of the nodes that are alive. Raise JoinError while no node answers."""
    join(address)
    return [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]


def await_nodes(address: str, num_nodes: int, timeout_s: float = _TIMEOUT_S) -> str:
    """Return one line: the nodes, or the missing ones after the time limit."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            names = _names(address)
            seen = f"Ray has {len(names)} of {num_nodes} nodes: {', '.join(sorted(names))}"
            if len(names) >= num_nodes:
                return seen
        except JoinError as error:
            seen = str(error)
        if time.monotonic() > deadline:
            sys.exit(f"after {timeout_s:g} s: {seen}")
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    print(await_nodes(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])))
