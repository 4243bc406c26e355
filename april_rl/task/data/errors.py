"""The error for data that cannot be used."""

from __future__ import annotations

from april_rl.errors import RunError


class DataError(RunError, ValueError):
    """Data that cannot be used; the message names the key, the file and, if known, the line."""
