"""Errors of planning that the user can fix."""

from __future__ import annotations

from april_rl.errors import RunError


class PreflightError(RunError):
    """The run cannot start on this machine with these settings."""


class LayoutError(RunError):
    """The settings ask for more workers than fit here, or for workers that do not form whole
    engines.
    """
