"""Start-up of child processes of the controller."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Iterable
from functools import cache
from multiprocessing.connection import Connection

from april_rl.config.runtime import UserCodeConfig
from april_rl.config.secrets import forget_secrets
from april_rl.config.user_code import GIB
from april_rl.errors import RunError

_MOST_FILES = 1 << 16
# The path of a socket has at most 107 bytes, and multiprocessing adds two names to the folder.
_MAX_FOLDER_BYTES = 107 - 32


def lifeline() -> Connection:
    """Return one end of a pipe for child processes; only the controller holds the other end.
    Raise RunError if the path for the socket of their fork server is too long.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        raise RunError(
            f"TMPDIR={folder} is too long for the sockets of reward and environment processes "
            f"(AF_UNIX): it has {len(os.fsencode(folder))} bytes, and at most {_MAX_FOLDER_BYTES} "
            "are possible; set TMPDIR to a shorter folder, such as /tmp"
        )
    return _pipe()[0]


def prepare(lifeline: Connection, limits: UserCodeConfig, *, keys: Iterable[str] = ()) -> None:
    """Set the limits of this process, and have it die with the controller; it keeps the secret
    variables `keys`, too.

    The limit of memory holds for this process, and for each one that it starts, and counts what
    they may write to: heap, stacks of threads and private mappings. Address space is not limited:
    Node and Java reserve much more of it than they use.
    """
    num_bytes = int(limits.memory_gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    die_with_controller(lifeline)
    forget_secrets({*limits.secrets, *keys})


def die_with_controller(lifeline: Connection) -> None:
    """Have the kernel kill this process, with its process group, which it must lead, when the
    controller ends for any reason.

    The hang-up of `lifeline` sends SIGKILL. A thread would not work, because this process may spend
    a long time in C code. PR_SET_PDEATHSIG would not work, because the parent may be the fork
    server, or a thread of the controller that ends earlier.
    """
    # Die at once: pebble's own handler waits until the interpreter has left C code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The pipe is opened again, because processes that share an open pipe also share its owner.
    own = os.open(f"/proc/self/fd/{lifeline.fileno()}", os.O_RDONLY)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    if lifeline.poll():
        os.kill(os.getpid(), signal.SIGKILL)


def raise_open_files() -> int:
    """Let this process, and each one that it starts, open as many files as the system allows,
    but at most 65,536, because some programs close every possible number. Return the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)


@cache
def _pipe() -> tuple[Connection, Connection]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    # Reading data forks processes that may outlive a killed controller.
    os.register_at_fork(after_in_child=writer.close)
    return reader, writer
