"""Ray's head process (gcs_server), seen from outside: whether anything listens at its address.

Ray tries for a minute to reach one that is gone, then ends every process of the cluster, also the
controller: from C++, so that nothing can be written or said any more.
"""

from __future__ import annotations

import errno
import functools
import socket
from collections.abc import Callable
from typing import Any

import ray

# One a look. A head that is started anew within them goes on with its cluster.
_REFUSALS = 5
_ANSWERS_S = 0.1  # a kernel does, within a cluster, also for a process that is busy


def _ray_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


class Head:
    """The process without which Ray cannot start, place or end anything.

    Only refusals count: they come from its machine's kernel and say that there is no such process.
    One that is busy or stopped is still connected to, and a network may be slow.
    """

    def __init__(self, find: Callable[[], str] = _ray_address) -> None:
        """`find` returns host:port; it is called with every question: Ray may start later."""
        self._find = find
        self._has_answered = False  # at an address where nothing ever did nobody has died
        self._refusals = 0  # in a row

    @property
    def address(self) -> str:
        """Where it listens, or did."""
        return self._find()

    @property
    def is_lost(self) -> bool:
        """Whether the last few looks found nobody there."""
        return self._refusals >= _REFUSALS

    def look(self) -> None:
        """Connect, once; waits for a tenth of a second at most."""
        outcomes = self._outcomes()
        self._has_answered |= 0 in outcomes
        is_refusal = outcomes == {errno.ECONNREFUSED} and self._has_answered
        self._refusals = self._refusals + 1 if is_refusal else 0

    def listens(self) -> bool:
        """Whether it is there now."""
        return 0 in self._outcomes()

    def _outcomes(self) -> set[int]:
        """Of connecting to each of its addresses: 0, or why not; none when its name has none."""
        try:
            return {_outcome(*place) for place in _places(self._find())}
        except socket.gaierror:
            return set()


def _outcome(family: socket.AddressFamily, where: tuple[Any, ...]) -> int:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as asked:
            asked.settimeout(_ANSWERS_S)
            return asked.connect_ex(where)
    except OSError as error:  # no more files may be opened, say
        return error.errno or errno.EIO


@functools.cache  # a name server may be slow, or gone by the next time
def _places(address: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """For the system's calls."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]
