"""The version of the package, which setup.cfg, checkpoints and `--version` read."""

__version__ = "0.1.0"
