"""Errors that the user can act on; they are shown as one message, without a traceback."""


class RunError(Exception):
    """Something outside the code is wrong: a setting, a file or a machine.

    The message says what to do.
    """


class ExportError(RunError):
    """The policy could not be written as a Hugging Face folder; the run itself continues."""


class EngineStalledError(RunError):
    """An engine did not return within the deadline."""
