"""`python -m april_rl checkpoint`; test_runs.py tests what it shows about a run, and
test_commands.py what arguments it refuses.
"""

from small_checkpoints import write

from april_rl.__main__ import main
from april_rl.run.checkpointing.checkpointer import STATE
from april_rl.run.checkpointing.columns import write_state
from april_rl.run.checkpointing.folder import set_aside_later
from april_rl.run.checkpointing.run_lock import own


def test_show_needs_a_folder_with_a_checkpoint(capsys):
    assert main(["checkpoint", "show"]) == 2
    assert "show takes one PATH, got none" in capsys.readouterr().err
    assert main(["checkpoint", "show", "nowhere"]) == 1
    assert "nowhere/checkpoints has no checkpoint" in capsys.readouterr().err


def test_show_ends_with_the_command_line_that_resumes(tmp_path, capsys):
    """In the directory of the run from its last checkpoint; in another directory from an earlier
    one, which would otherwise set later ones aside. Fails when an argument of the run is missing.
    """
    state = {
        "collector": {
            "ledger": {"opened": 3, "parked": 2, "trained": 1},
            "buffer": {"open": [], "ready": []},
        }
    }
    given = ["+recipe=tiny_cpu", "data.answer_pattern=(a|b)", "resume=elsewhere", "+sweep=alpha"]
    about = {"name": "tiny", "model": "model", "num_steps": 8}
    for step in (1, 2):
        folder = write(tmp_path / "checkpoints", step, **about, overrides=given)
        write_state(state, folder, STATE)
    command = "resume     python -m april_rl.train +recipe=tiny_cpu 'data.answer_pattern=(a|b)' "
    last, first = folder, folder.with_name("step_1")
    for path, end in (
        (tmp_path, f"resume={last} hydra.run.dir={tmp_path}"),
        (first, f"resume={first}"),
    ):
        assert main(["checkpoint", "show", str(path)]) == 0
        assert f"{command}{end}\n" in capsys.readouterr().out
    write_state(state, write(tmp_path / "old" / "checkpoints", 1, **about), STATE)
    assert main(["checkpoint", "show", str(tmp_path / "old")]) == 0
    assert "resume     python -m april_rl.train ... resume=" in capsys.readouterr().out


def test_abandoned_checkpoints_are_listed_counted_and_removed_on_request(tmp_path, capsys):
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        write(root, step)
    set_aside_later(root / "step_1")
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rpartition("/")[2] for line in lines] == [
        "step_1",
        "step_2.abandoned",
        "step_3.abandoned",
    ]
    assert total == "checkpoints: 1, abandoned: 2, 0.0 MiB in total"
    assert main(["checkpoint", "prune", str(tmp_path)]) == 0
    assert not capsys.readouterr().out
    assert main(["checkpoint", "prune", str(tmp_path), "keep_abandoned=0"]) == 0
    assert capsys.readouterr().out.count("removed") == 2
    assert [path.name for path in root.glob("step_*")] == ["step_1"]


def test_a_run_in_progress_is_not_pruned(tmp_path, capsys):
    write(tmp_path / "checkpoints", 1)
    with own(tmp_path):
        assert main(["checkpoint", "prune", str(tmp_path), "keep_abandoned=0"]) == 1
    assert "The run prunes by itself: checkpoint.keep_last" in capsys.readouterr().err
