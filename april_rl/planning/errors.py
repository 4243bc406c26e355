"""Errors of planning, which the user can act on."""

from __future__ import annotations

from april_rl.errors import RunError


class PreflightError(RunError):
    """The run cannot start on this machine with these settings."""


class LayoutError(RunError):
    """The settings ask for workers that do not exist here, or that form no whole engines."""
