"""The threads a worker computes with on CPU."""

from __future__ import annotations


def thread_environment(threads: int) -> dict[str, str]:
    """What to put into a process's environment before it imports torch.

    Idle threads spin for some microseconds between two operations and then sleep: without that,
    small matrices wait for threads to wake; spinning for ever, engine, learner, controller and
    rewards take each other's cores (steps up to ten times slower on two of them).
    """
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "3000"}
