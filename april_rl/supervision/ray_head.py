"""Check whether Ray's head process (gcs_server) still exists, that is, whether a process listens at
its address.

When it is gone, Ray tries to reach it for a minute and then ends every process of the cluster, the
controller too, from C++: nothing can be saved or reported any more.
"""

from __future__ import annotations

import errno
import functools
import socket
from collections.abc import Callable
from typing import Any

import ray

# Pauses between checks. A head process that is restarted within them keeps its cluster.
_MAX_REFUSALS = 5
_CONNECT_TIMEOUT_S = 0.1  # enough, since the kernel accepts connections for a busy process too


def _ray_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


class RayHead:
    """The process that Ray needs to start, place and end anything.

    Only refused connections count: the kernel of its machine refuses when no process listens.
    Connections to a busy or stopped head process still succeed, and a network may be slow.
    """

    def __init__(self, find_address: Callable[[], str] = _ray_address) -> None:
        self._find_address = find_address
        self._has_listened = False  # a refusal counts only if something listened before
        self._num_refusals = 0  # consecutive

    @property
    def address(self) -> str:
        return self._find_address()

    @property
    def is_lost(self) -> bool:
        return self._num_refusals >= _MAX_REFUSALS

    def check(self) -> None:
        """Try to connect once; takes a tenth of a second at most."""
        results = self._connect()
        self._has_listened |= 0 in results
        is_refused = results == {errno.ECONNREFUSED} and self._has_listened
        self._num_refusals = self._num_refusals + 1 if is_refused else 0

    def is_listening(self) -> bool:
        return 0 in self._connect()

    def _connect(self) -> set[int]:
        """Return an error number for each address of the host, 0 for success."""
        try:
            return {_connect_to(*where) for where in _resolve(self._find_address())}
        except socket.gaierror:
            return set()


def _connect_to(family: socket.AddressFamily, where: tuple[Any, ...]) -> int:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            return connection.connect_ex(where)
    except OSError as error:  # for example too many open files
        return error.errno or errno.EIO


@functools.cache  # a name server may be slow, or unreachable later
def _resolve(address: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]
