"""The command line before anything is loaded: help, and what a refused run leaves behind."""

import sys
from pathlib import Path

import pytest
from command_line import run
from omegaconf import OmegaConf
from printed_error import refused_training
from source_tree import ROOT

from april_rl.config.store import compose_overrides, config_dir, recipes, to_config

COMMAND = "python -m april_rl.train "
HELP = OmegaConf.load(Path(config_dir()) / "train.yaml").hydra.help.template
# The words after the command in each line that begins with it, up to the comment.
EXAMPLES = [
    line.strip().removeprefix(COMMAND).partition("   ")[0]
    for line in HELP.splitlines()
    if line.strip().startswith(COMMAND)
]


TRAIN = [sys.executable, "-m", "april_rl.train"]


@pytest.mark.slow
def test_help_says_how_to_start_and_where_settings_and_recipes_are(tmp_path: Path) -> None:
    """Fails when Hydra's own template is shown: no command, no description."""
    assert len(EXAMPLES) == 5
    done = run([*TRAIN, "--help"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m april_rl.train")
    for wanted in (
        "+recipe=tiny_cpu",
        "--multirun",
        "hydra.run.dir",
        *(name for name in recipes() if "/" not in name),
    ):
        assert wanted in done.stdout
    files = [word for word in done.stdout.split() if word.startswith("april_rl/")]
    assert files == ["april_rl/config/schema.py"]
    assert all((ROOT / file).is_file() for file in files)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_are_settings_that_work_together(example: str) -> None:
    """Fails when one names a recipe or a key that does not exist, or has an option in
    the middle.
    """
    options = [word for word in example.split() if word not in ("--multirun", "--cfg", "job")]
    to_config(compose_overrides([word.partition(",")[0] for word in options]))
    middle = example.split()[1:-1]
    assert not [word for word in middle if word in ("--multirun", "-m")]


def test_a_refused_run_leaves_no_folder_and_deletes_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+recipe=tiny_cpu", "seed=-1", "hydra.run.dir=run"]
    message = "seed must be in [0, 2**32), got -1\n"
    assert refused_training(words, capsys, monkeypatch) == message
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("mine")
    assert refused_training(words, capsys, monkeypatch) == message
    assert (tmp_path / "run" / "notes").read_text() == "mine"


def test_a_refused_run_does_not_end_the_others_of_the_sweep(tmp_path: Path) -> None:
    """One message for each, and no folder of a run that never started."""
    words = ["--multirun", "+recipe=tiny_cpu", "seed=-1,-2", "hydra.sweep.dir=sweep"]
    done = run([*TRAIN, *words], tmp_path)
    assert done.returncode == 1
    *errors, failed = done.stderr.splitlines()
    assert errors == [f"error: seed must be in [0, 2**32), got {seed}" for seed in (-1, -2)]
    assert failed.startswith("failed: ")
    assert failed.endswith("1_tiny_cpu")
    assert "comparison: not written (error: sweep is not a run directory" in done.stdout
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["multirun.yaml"]


SIGNALLED = """
import os, signal, time
from april_rl.start import command_line
from april_rl.start.planning import checks

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def start(config):
    Dropped()
    time.sleep(60)

checks.check_settings = start
command_line.main()
"""


def test_a_stop_whose_exception_python_drops_still_ends_the_start_soon(tmp_path: Path) -> None:
    """SIGTERM arrives while an object's `__del__` runs, in a start that only sleeps. Fails when the
    start continues, and stacks of threads are printed only at the deadline.
    """
    words = ["-c", SIGNALLED, "+recipe=tiny_cpu", "hydra.run.dir=run"]
    done = run([sys.executable, *words], tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (130, "interrupted"), done.stderr
    assert "stacks" not in done.stderr
