"""Environments for the tests of the pool; most of them fail in some way."""

# ruff: noqa: ARG002 - a method has its arguments, whether it needs them or not

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from april_rl.task.environments.protocol import StepResult


class Told:
    """Environment that does what the turn says, with times in milliseconds; the answer column names
    a file that gets a line per call.
    """

    def load(self, context):
        self.context = context

    def reset(self, row, seed):
        self.row, self.turns = row, []
        self.note(f"reset {seed}")
        opening = row["prompt"].partition("|")[2]
        if opening == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if opening == "wait":
            time.sleep(60)
        return opening

    async def step(self, turn):
        self.turns.append(turn.text)
        self.note(turn.text)
        word, _, rest = turn.text.partition(" ")
        if word == "end":
            return StepResult(reward=float(rest or 1), is_final=True)
        if word == "sleep":
            await asyncio.sleep(int(rest) / 1000)
        if word == "raise":
            raise KeyError("no such tool")
        if word == "raiseonce" and not self.context.is_replay:
            raise KeyError("not yet")
        if word == "timeout":
            raise TimeoutError("of a socket")
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "dieonce" and not self.context.is_replay:
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "block":
            time.sleep(int(rest) / 1000)
        if word == "write":  # into the connection of the process, which is a socket
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                        os.write(descriptor, b"\x00\x00\x00\x04junk")
            await asyncio.sleep(60)
        if word == "fork":  # a child that does not end, as when `execvp` finds no program
            child = os.fork()
            await asyncio.sleep(0.2)
            return StepResult(f"{len(self.turns)}" if child else "wrong")
        if word == "spoil":
            Told.note = None
            return StepResult("1")
        if word == "start":
            program = subprocess.Popen(["sleep", "600"])
            return StepResult(str(program.pid))
        if word == "nan":
            return StepResult(reward=float("nan"))
        if word == "tuple":
            return "plain", 0.5, True
        if word == "none":
            return None
        if word == "norole":
            return StepResult([{"content": "1"}])
        if word == "flood":
            return StepResult("1" * int(rest))
        if word == "pid":
            return StepResult(str(os.getpid()))
        return StepResult(f"{len(self.turns)}{turn.text}", reward=0.5)

    def note(self, line):
        if "/" in self.row["answer"]:
            with Path(self.row["answer"]).open("a") as file:
                file.write(f"{line}\n")


class Clerk:
    """Environment that sends each letter once; a turn says what goes wrong."""

    def load(self, context):
        self.context = context

    def reset(self, row, seed):
        self.letters = row["answer"]

    async def step(self, turn):
        receipt = await self.context.once(send, self.letters, turn.text)
        if turn.text == "die" and not self.context.is_replay:
            os.kill(os.getpid(), signal.SIGKILL)
        return StepResult(receipt)


class SlowClerk:
    """Environment that sends a letter too slowly the first time, and then another one."""

    def load(self, context):
        self.once = context.once

    def reset(self, row, seed):
        self.letters = row["answer"]

    def step(self, turn):
        try:
            self.once(send_slowly, self.letters)
            return StepResult(self.once(send_plainly, self.letters, turn.text))
        except RuntimeError:
            with Path(self.letters).open("a") as file:
                file.write("woke\n")
            raise


def send_slowly(letters, call):
    with Path(letters).open("a") as file:
        file.write(f"first {call.attempt}\n")
    time.sleep(1.5 if call.attempt == 1 else 0)


def send_plainly(letters, text, call):
    with Path(letters).open("a") as file:
        file.write(f"{text} {call.attempt}\n")
    return f"{text}{call.attempt}"


async def send(letters, text, call):
    with Path(letters).open("a") as file:
        file.write(f"{text} {call.attempt}\n")
    if text == "dieinside" and call.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{text}{call.attempt}"


class Forgetful:
    """Environment that answers differently each time."""

    num_made = 0

    def reset(self, row, seed):
        pass

    def step(self, turn):
        if turn.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return StepResult(str(time.monotonic_ns()))


class Meeting:
    """Environment with two episodes in one process, each of which waits for the other one."""

    barrier = threading.Barrier(2)

    def reset(self, row, seed):
        pass

    def step(self, turn):
        self.barrier.wait(timeout=60)
        return StepResult(is_final=True)


class WithoutStep:
    def reset(self, row, seed):
        pass


class NeedsArgument:
    def __init__(self, size, truncated=False):
        raise ValueError(f"size {size} is too small")

    def reset(self, row, seed):
        pass

    def step(self, turn):
        return StepResult()


class Variables:
    """Environment that records the variables of its process and of a program."""

    def reset(self, row, seed):
        self.notes = Path(row["answer"])

    def step(self, turn):
        script = "import json, os; print(json.dumps(dict(os.environ)))"
        program = subprocess.check_output([sys.executable, "-c", script], text=True)
        self.notes.write_text(f"{json.dumps(dict(os.environ))}\n{program}")
        return StepResult()


class Plain:
    """Environment like Told, with a `step` that is not a coroutine."""

    def reset(self, row, seed):
        pass

    def step(self, turn):
        word, _, rest = turn.text.partition(" ")
        if word == "sleep":
            time.sleep(float(rest))
        if word == "next":
            return next(iter([]))
        if word == "close":
            raise GeneratorExit("closed")
        if word == "files":
            return StepResult(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        return StepResult(f"{os.getpid()}")
