"""Trains as april_rl.train does, but its first checkpoint cannot be written:
`failing_writer.py memory|type|disk key=value ...`.
"""

from __future__ import annotations

import errno
import os
import sys
from unittest.mock import DEFAULT, patch

from april_rl.run.checkpointing import checkpointer
from april_rl.run.checkpointing.columns import write_state
from april_rl.start.command_line import main

_ERRORS = {
    "memory": MemoryError("no memory for the copy"),
    "type": TypeError("this value cannot be written"),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


def _train(error: Exception) -> None:
    errors = [error]

    def fail_once(*_: object) -> object:
        if errors:
            raise errors.pop()
        return DEFAULT  # the real writer does the same

    with patch.object(checkpointer, "write_state", wraps=write_state, side_effect=fail_once):
        main()


if __name__ == "__main__":
    _train(_ERRORS[sys.argv.pop(1)])
