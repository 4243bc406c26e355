"""Names of shared memory that outlive a killed process, taken away while it runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MAPS = Path("/proc/self/maps")  # of Linux: address, mode, offset, device, inode, path
_NAMES = Path("/dev/shm")
# vLLM's reduction between ranks on CPU, its message queues, and the locks of multiprocessing.
_KINDS = re.compile(r".*-cpushm_\d+|psm_\w+|sem\.mp-\w+")


def forget_names() -> int:
    """How many names were taken off the shared memory that vLLM has open in this process.

    For when every rank of an engine has started: all have it open then, and nobody asks for a name
    again. Memory without a name goes with the last process that has it open, however that ends.
    """
    if not _MAPS.exists():
        return 0
    lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    # By inode: a lock is made under another name than the one it gets.
    held = {int(line[4]) for line in lines if line[-1].startswith(f"{_NAMES}/")}
    with os.scandir(_NAMES) as entries:
        names = [e.path for e in entries if _KINDS.fullmatch(e.name) and e.inode() in held]
    for name in names:
        Path(name).unlink(missing_ok=True)
    return len(names)
