"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """From now on the kernel ends this process when its parent does, also when it is stopped.

    Ray's workers notice the end of their node by themselves, unless they are stopped: then they
    would hold their memory, and their GPU, for ever.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == 1:  # it ended before it could be asked
        os.kill(os.getpid(), signal.SIGKILL)
