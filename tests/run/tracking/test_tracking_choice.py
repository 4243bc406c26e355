"""The default tracker is installed."""

import re
from configparser import ConfigParser

from source_tree import ROOT

from april_rl.config.tracking import TrackingConfig


def test_a_plain_installation_has_the_tracker_that_runs_use_by_default():
    """Fails when a program from `pip install april_rl` refuses its own default settings."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.MULTILINE)
    assert {backend.value for backend in TrackingConfig().backends} <= set(required)
