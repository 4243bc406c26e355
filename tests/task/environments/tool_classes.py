"""Environments in the form of TRL's `environment_factory`."""

# ruff: noqa: ARG002 - TRL gives every column

from __future__ import annotations

import asyncio


class Counter:
    """A counter that a policy brings to a number."""

    def reset(self, target: int, **kwargs) -> str | None:
        """Begin at zero."""
        self.value, self.target = 0, target
        return f"Count to {target}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        self.value += step
        return self.value

    async def wait(self) -> str:
        """
        Wait for nothing.
        """
        await asyncio.sleep(0)
        return "waited"

    def find(self) -> str:
        """
        Find nothing.
        """
        return next(iter([]))

    def power(self, function: int, run: int) -> int:
        """
        Raise a number to a power.

        Args:
            function: The number.
            run: The power.
        """
        return function**run

    def leave(self) -> str:
        """
        Leave.
        """
        raise SystemExit(3)

    def fail(self) -> str:
        """
        Fail always.
        """
        raise RuntimeError("no such counter")

    def get_reward(self) -> float:
        """Return whether the counter is there."""
        return float(self.value == self.target)


class Undescribed:
    def reset(self, **kwargs):
        return None

    def act(self, move):
        return move


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: A number.
        second: Another one.
    """
    return first + second


async def later(first: int, second: int) -> int:
    """Add two numbers after a while.

    Args:
        first: A number.
        second: Another one.
    """
    await asyncio.sleep(0)
    return first + second


def undescribed(first, second):
    return first + second


def step(turn: str) -> str:
    """Take a step.

    Args:
        turn: Where to.
    """
    return turn


TOOLS = [add, later]
TWICE = (add, add)
NUMBER = 3
