"""Set the mode of files that a library makes readable only for their owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE


@contextmanager
def mode_of_new_files(path: Path) -> Iterator[None]:
    """Give a file that is written in the `with` block the mode of any new file, set by the umask.

    safetensors 0.8 writes 0600, so that no one else could serve an export. The mode is read from
    a new file, because the umask can be read only by changing it for all threads.
    """
    path.touch()
    mode = S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)
