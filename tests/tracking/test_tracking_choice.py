"""Which trackers there are, and that the default one is installed."""

import re
from configparser import ConfigParser

from source_tree import ROOT

from april_rl.config.tracking import TrackingConfig
from april_rl.tracking import backends
from april_rl.tracking.labels import RunLabels


def test_a_tracker_that_is_not_known_is_not_taken_for_another(tmp_path, capsys):
    """A name without a library of ours. Fails when the last tracker of the list is the default."""
    settings = backends.BackendSettings(
        backends=("mlflow",), labels=RunLabels(name="tiny"), run_dir=tmp_path, config={}
    )
    started = backends.start_backends(settings, tell=print)
    assert started.open == {}
    assert "mlflow failed" in capsys.readouterr().out


def test_a_plain_installation_has_the_tracker_that_runs_use_by_default():
    """Fails when `pip install april_rl` installs a program that its default settings refuse."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.MULTILINE)
    assert {backend.value for backend in TrackingConfig().backends} <= set(required)
