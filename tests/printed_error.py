"""The error that a command prints."""

import pytest


def printed_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command, which has printed this one line and nothing else."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err.removeprefix("error: ")
