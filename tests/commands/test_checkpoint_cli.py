"""`python -m april_rl checkpoint`: what it refuses; test_runs.py has what it shows of a run."""

from __future__ import annotations

import pytest

from april_rl.commands import checkpoint


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["show", "nowhere"], 1, "nowhere has no folder checkpoints"),
        (["show"], 2, "one PATH"),
        (["burn", "nowhere"], 2, "give one command (show"),
        (["prune", "nowhere", "keep_last=0"], 2, "keep_last must be a number >= 1, got 0"),
    ],
)
def test_checkpoint_commands_with_wrong_arguments_are_refused(arguments, status, message, capsys):
    """Fails when a traceback answers."""
    assert checkpoint.main(arguments) == status
    assert message in capsys.readouterr().err
