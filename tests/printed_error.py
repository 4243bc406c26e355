"""The error that a command prints."""

import sys

import pytest

from april_rl.start.command_line import main


def printed_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command, which has printed this one line and nothing else."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err.removeprefix("error: ")


def refused_training(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the error of a training that is started with `words` and refused."""
    monkeypatch.setattr(sys, "argv", ["april_rl.train", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    return printed_error(capsys)
