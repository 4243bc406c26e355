"""Reward functions for the tests of the pool; most of them fail in some way."""

# ruff: noqa: ARG001, ARG002 - a reward function has three arguments, whether it needs them or not

import asyncio
import os
import signal
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import numpy as np


def exact(prompts, responses, answers):
    """Return 1.0 for the answer itself, as a numpy array."""
    return np.array([float(r == a) for r, a in zip(responses, answers, strict=True)])


def told(prompts, responses, answers):
    """Behave as the response says; `answers` names a file that counts the attempts."""
    return [_obey(response, answer) for response, answer in zip(responses, answers, strict=True)]


def raises(prompts, responses, answers):
    raise KeyError("no such rubric")


def returns_nan(prompts, responses, answers):
    return [float("nan")] * len(responses)


def returns_one_for_all(prompts, responses, answers):
    return [0.5]


def returns_text(prompts, responses, answers):
    return ["1.0"] * len(responses)


def returns_nothing(prompts, responses, answers):
    """Return None, like a function without a return statement."""


def hangs(prompts, responses, answers):
    time.sleep(1000)


not_a_function = 3


def _obey(order: str, answer: str) -> float:
    if order.startswith("first time "):
        order = "" if Path(answer).exists() else order.removeprefix("first time ")
        Path(answer).touch()
    if order == "hang":
        while True:
            pass
    if order == "sleep":
        time.sleep(1.0)
    if order == "wait":
        while not Path(answer).exists():
            time.sleep(0.02)
    if order == "exit":
        os._exit(3)
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "kill its group":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    if order == "kill a program's group":
        with subprocess.Popen(["sleep", "60"]) as program:
            os.killpg(os.getpgid(program.pid), signal.SIGKILL)
    if order == "break all pipes":
        _break_all_pipes()
    if order == "hunger":
        return float(len(bytearray(5 * 2**30)))
    if order == "reserve 2 GiB":
        reserves_2_gib([], [], [])
    if order == "raise":
        raise ValueError("unreadable response")
    if order == "raise half a pair":
        raise ValueError("unreadable \ud800")
    if order in {"nan", "inf", "1e31"}:
        return float(order)
    if order in ("tell pid", "tell pid and hang"):
        Path(answer).write_text(str(os.getpid()))
    if order == "tell pid and hang":
        time.sleep(1000)
    return 1.0


def _break_all_pipes():
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if number > 2 and stat.S_ISFIFO(os.fstat(number).st_mode):
                os.set_blocking(number, False)
                os.write(number, b"\0\0\0\x20" + b"x" * 40)


def even_length(prompts, responses, answers):
    """Return 1.0 for an even number of characters, so that any random policy has signal."""
    return [float(len(response) % 2 == 0) for response in responses]


def odd_length(prompts, responses, answers):
    return [1.0 - reward for reward in even_length(prompts, responses, answers)]


def even_length_in_its_own_time(prompts, responses, answers):
    time.sleep(SystemRandom().uniform(0.0, 0.04))
    return even_length(prompts, responses, answers)


def even_length_but_late(prompts, responses, answers, *, late, metrics, num_rows):
    """Return the rewards of `even_length`; for the prompt `late`, wait until the file `metrics` has
    `num_rows` rows.
    """
    while prompts[0] == late and 0 < _num_lines(Path(metrics)) < num_rows:
        time.sleep(0.02)
    return even_length(prompts, responses, answers)


def _num_lines(file: Path) -> int:
    """Return 0 as long as there is no file, because rewards are tried before a run has one."""
    return file.read_text().count("\n") if file.exists() else 0


def reserves_2_gib(prompts, responses, answers):
    """Reserve 2 GiB of address space."""
    np.empty(2 * 2**30, dtype=np.uint8)
    return [1.0] * len(responses)


def rank(prompts, responses, answers):
    """Return the rank of each response in its group by length, which needs the whole group."""
    lengths = [len(response) for response in responses]
    return [float(sorted(lengths).index(length)) for length in lengths]


async def group_size(prompts, responses, answers, *, base=0):
    """Return the number of responses of a call, after a short wait."""
    await asyncio.sleep(0.01)
    return [float(base + len(responses))] * len(responses)


def with_columns(prompts, responses, answers, difficulty, num_tokens, truncated=None, unit=1.0):
    """Return a number made of data columns, response lengths and truncation."""
    assert truncated is not None
    return [
        unit * d + 10 * n + 100 * t
        for d, n, t in zip(difficulty, num_tokens, truncated, strict=True)
    ]


def unsure(prompts, responses, answers):
    """Return None for some responses."""
    return [None if response == "odd" else 1.0 for response in responses]


def data_sets(prompts, responses, answers, datasets):
    """Return 1.0 for prompts of the data set `a`."""
    return [float(dataset == "a") for dataset in datasets]


def two(prompts, responses):
    """Take too few arguments."""
    return [0.0] * len(responses)


def of_trl(completions, prompts, target, **kwargs):
    """Take the arguments that TRL gives, in its order."""
    return [0.0] * len(completions)


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


def of_openrlhf(queries, prompts, labels):
    return [0.0] * len(queries)


def in_another_order(_answers, difficulty, responses, *, prompts):
    """Return the lengths of the response, the prompt and the answer, and the difficulty."""
    shown = zip(responses, prompts, _answers, difficulty, strict=True)
    return [len(r) + 10 * len(p) + 100 * len(a) + 1000 * d for r, p, a, d in shown]


def by_place(*lists, difficulty):
    """Return the length of the response and the difficulty, taken by position."""
    return [len(r) + 10 * d for r, d in zip(lists[1], difficulty, strict=True)]


def never_sure(prompts, responses, answers):
    """Always return None, like a judge that is unreachable."""
    return [None] * len(responses)


class Counter:
    """Return how many calls there were, times `step`; write a line when it is loaded."""

    def __init__(self, step=1):
        self.step, self.num_calls = step, 0

    def load(self, context):
        if context.folder is not None:
            with (context.folder / "loaded").open("a") as file:
                file.write(f"{os.getpid()}\n")

    def __call__(self, prompts, responses, answers):
        if responses[0] == "exit":
            os._exit(3)
        self.num_calls += 1
        return [self.step * self.num_calls] * len(responses)

    def save(self):
        return {"num_calls": self.num_calls}

    def restore(self, state):
        self.num_calls = state["num_calls"]


class CountsCalls(Counter):
    """A counter that writes nothing, because a refused resume loads it too and must leave its run
    unchanged.
    """

    def load(self, context):
        pass


class SavesOnly(Counter):
    """A reward without `restore`."""

    restore = None


class SavesASet(Counter):
    """A reward that saves a value that JSON cannot represent."""

    def save(self):
        return {self.num_calls}


class SavesASetLater(Counter):
    """A reward that saves a value that JSON cannot represent, after the first call."""

    def save(self):
        return {self.num_calls} if self.num_calls else 0


class NotCallable:
    """A reward without `__call__`."""


class LoadedAnywhere:
    """A reward that writes a file in the run's directory when it is loaded, in any process."""

    load = Counter.load

    def __call__(self, prompts, responses, answers, difficulty):
        return [1.0] * len(responses)


def knows(prompts, responses, answers, *, api_key_env=""):
    """Return 1 for the name of an existing environment variable."""
    return [float(response in os.environ) for response in responses]
