"""Start-up of child processes of the controller."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal


def die_with_controller() -> None:
    """Have the kernel kill this process when the controller ends, however either of them ends.

    The controller holds the other end of a pipe, whose hang-up sends SIGKILL. A thread would not
    work, because this process may be in C code for long, nor would PR_SET_PDEATHSIG, because the
    parent may be the fork server, or a thread of the controller that ends earlier.
    """
    # Die at once: pebble's own handler waits until the interpreter leaves C code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    controller = multiprocessing.parent_process()
    assert controller is not None, "this is for processes that multiprocessing started"
    fcntl.fcntl(controller.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(controller.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(controller.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not controller.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
