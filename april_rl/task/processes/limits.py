"""Limits of the child processes that run the user's code."""

from __future__ import annotations

import resource
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import NamedTuple

from april_rl.config.secrets import forget_secrets
from april_rl.config.user_code import GIB
from april_rl.task.processes.child_process import die_with_controller


class Limits(NamedTuple):
    """Limits of a child process, from the settings of its section."""

    memory_gib: float
    secrets: Collection[str]  # secret environment variables that it keeps


def prepare(lifeline: Connection, limits: Limits, *, with_group: bool = False) -> None:
    """Set the limits of this process, and have it die with the controller.

    The limit of memory holds for this process, and for each one that it starts, and counts what
    they may write to: heap, stacks of threads and private mappings. Address space is not limited:
    Node and Java reserve much more of it than they use.
    """
    num_bytes = int(limits.memory_gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    die_with_controller(lifeline, with_group=with_group)
    forget_secrets(limits.secrets)
