"""A clock in place of the machine's."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock that moves only when a test moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
