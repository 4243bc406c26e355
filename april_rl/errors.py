"""The errors a person can act on: shown as one message, without a traceback."""


class RunError(Exception):
    """Something outside the code is wrong: a setting, a file, a machine. The message says what to
    do.
    """
