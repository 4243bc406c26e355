"""The start of child processes."""

from __future__ import annotations

import tempfile

import pytest

from april_rl.errors import RunError
from april_rl.task.processes.child_process import lifeline


def test_a_temporary_folder_that_is_too_long_for_sockets_is_named(monkeypatch):
    for length in (75, 76):
        folder = "/" + "t" * (length - 1)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        if length == 75:
            lifeline()
            continue
        with pytest.raises(RunError, match=f"TMPDIR={folder} is too long .* has 76 bytes"):
            lifeline()
