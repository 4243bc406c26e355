"""Errors that the user can act on; they are shown as one message, without a traceback."""


class RunError(Exception):
    """Something outside the code is wrong: a setting, a file or a machine.

    The message says what to do.
    """


class ExportError(RunError):
    """The policy could not be written as a Hugging Face folder; the run itself continues."""


class EngineStalledError(RunError):
    """An engine did not return within the deadline."""


class DataError(RunError, ValueError):
    """Data that cannot be used; the message names the key, the file and, if known, the line."""


class PreflightError(RunError):
    """The run cannot start on this machine with these settings."""


class LayoutError(RunError):
    """More workers than fit here are asked for, or ones that do not form whole engines."""
