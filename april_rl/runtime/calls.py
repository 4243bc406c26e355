"""Calls to workers and what comes of them: results, or the first failure as one error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from april_rl.errors import RunError

T = TypeVar("T")


class WorkerDiedError(RunError):
    """A worker failed; the message holds its own traceback."""


def results(calls: Sequence[ray.ObjectRef[T]]) -> list[T]:
    """The results, in order; a RunError of a worker as it is, any other failure as WorkerDiedError.

    The first failure counts, whichever rank it comes from: the others may wait for that rank for
    ever.
    """
    waiting = list(calls)
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1)
        try:
            ray.get(ended)
        except RayTaskError as error:
            if isinstance(error.cause, RunError):
                raise error.cause from None
            raise WorkerDiedError(f"worker failed:\n{error}") from None
        except RayActorError as error:
            raise WorkerDiedError(f"a worker process died: {error}") from None
    return list(ray.get(list(calls)))
