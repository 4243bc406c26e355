"""Start-up of child processes of the controller."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import tempfile
from functools import cache
from multiprocessing.connection import Connection

from april_rl.errors import RunError

_MOST_FILES = 1 << 16
# The path of a socket has 107 bytes; multiprocessing adds /pymp-XXXXXXXX/listener-XXXXXXXX.
_MAX_FOLDER_BYTES = 107 - 32


def lifeline() -> Connection:
    """Return the end of a pipe, for child processes, whose other end the controller alone holds.
    Raise RunError where the fork server, from which they start, would find no room for its socket.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        raise RunError(
            f"TMPDIR={folder} is too long for the sockets of reward and environment processes "
            f"(AF_UNIX): it has {len(os.fsencode(folder))} bytes, at most {_MAX_FOLDER_BYTES} are "
            "possible; set TMPDIR to a shorter folder, such as /tmp"
        )
    return _pipe()[0]


def die_with_controller(lifeline: Connection, *, with_group: bool = False) -> None:
    """Have the kernel kill this process when the controller ends, however either of them ends;
    optionally with its process group, which it must lead.

    The hang-up of `lifeline` sends SIGKILL. A thread would not work, because this process may be in
    C code for long, nor would PR_SET_PDEATHSIG, because the parent may be the fork server, or a
    thread of the controller that ends earlier.
    """
    # Die at once: pebble's own handler waits until the interpreter leaves C code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Opened again, because processes that share an open pipe share its owner, too.
    own = os.open(f"/proc/self/fd/{lifeline.fileno()}", os.O_RDONLY)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpid() if with_group else os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    if lifeline.poll():
        os.kill(os.getpid(), signal.SIGKILL)


def limit_memory(num_bytes: int) -> None:
    """Limit the memory that this process, and each that it starts, may write to: heap, stacks of
    threads and private mappings. Address space is free: Node and Java reserve much more of it than
    they use.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def raise_open_files() -> int:
    """Let this process, and each that it starts, open as many files as the system allows it, at
    most 65,536: some programs close each number that there could be. Return that number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)


@cache
def _pipe() -> tuple[Connection, Connection]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    # Reading data forks processes, which may outlive a controller that is killed.
    os.register_at_fork(after_in_child=writer.close)
    return reader, writer
