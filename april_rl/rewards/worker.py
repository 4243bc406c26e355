"""What runs in a reward process: loading the function, decoding the response, calling the function
and judging what it returns.

Everything that comes back is plain data: the controller must not import the user's module to
unpickle an exception.
"""

from __future__ import annotations

import fcntl
import importlib
import math
import multiprocessing
import os
import pickle
import resource
import signal
import traceback
from array import array
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Literal, Self

MATH_VERIFY = "math_verify"
GIB = 1 << 30

Reward = Callable[[list[str], list[str], list[str]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One response to score, as it travels: four bytes a token."""

    prompt: str
    token_ids: array[int]  # the response [R], C ints
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedJob:
    """One response to score, as a reward function sees it."""

    prompt: str
    response: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a job.

    `raised`: the function raised. `refused`: the function itself is at fault, whatever the
    response; `message` says how, as the end of a sentence that begins with its name. `undecoded`:
    the function was not called, for want of a text; `message` says why.
    """

    outcome: Literal["scored", "soft_timeout", "raised", "refused", "undecoded"]
    value: float = math.nan
    message: str = ""


Decode = Callable[[Sequence[int]], str]
Scorer = Callable[[list[DecodedJob]], list[Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a reward process has before its first job."""

    scorer: Scorer
    decode: Decode


# Of this process, or why it has none: the pool's calls have no other way to it.
loaded: Loaded | Verdict = Verdict(outcome="refused", message="is not loaded")


class Caught:
    """A context in which the user's code may raise anything; `message` is then a line on it."""

    def __init__(self) -> None:
        """Nothing caught yet."""
        self.message = ""

    def __enter__(self) -> Self:
        """The context itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        """Keep the error's last line and its place, and go on."""
        if error is not None:
            last_line = traceback.format_exception_only(error)[-1].strip()
            self.message = f"{last_line}{_place(error, tb)}{_limit(error)}"
        return True


def prepare_process(
    function: str, *, extract: str, soft_timeout_s: float, memory_bytes: int, decoder: bytes
) -> None:
    """Limits of a reward process, and all that is loaded before its first job is timed; `decoder`
    is a pickled `Decode`.
    """
    global loaded
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # At once: pebble's own handler waits until the interpreter is out of C code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_controller()
    scorer = partial(load_scorer, function, extract=extract, soft_timeout_s=soft_timeout_s)
    loaded = load(scorer, decoder)


def die_with_controller() -> None:
    """Have the kernel kill this process when the controller ends, however either of them ends.

    The controller holds the other end of a pipe, whose hang-up is made to send SIGKILL. Neither a
    thread (this process may be in C code for long) nor PR_SET_PDEATHSIG (the parent is the fork
    server) would do.
    """
    controller = multiprocessing.parent_process()
    assert controller is not None, "this is for reward processes only"
    fcntl.fcntl(controller.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(controller.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(controller.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not controller.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def score(job: Job) -> Verdict:
    """The verdict on one job."""
    if isinstance(loaded, Verdict):
        return loaded
    with Caught() as caught:
        response = loaded.decode(job.token_ids)
    if caught.message:
        return Verdict(outcome="undecoded", message=caught.message)
    return loaded.scorer([DecodedJob(prompt=job.prompt, response=response, answer=job.answer)])[0]


def try_out(jobs: list[DecodedJob]) -> list[Verdict]:
    """The verdicts on several jobs of one call; a single one when something cannot be loaded."""
    return [loaded] if isinstance(loaded, Verdict) else loaded.scorer(jobs)


def load(new_scorer: Callable[[], Scorer], decoder: bytes) -> Loaded | Verdict:
    """The function and the decoder, or the verdict on every job when one cannot be loaded."""
    with Caught() as caught:
        scorer = new_scorer()
    if caught.message:
        return Verdict(outcome="refused", message=f"cannot be loaded: {caught.message}")
    with Caught() as caught:
        return Loaded(scorer=scorer, decode=pickle.loads(decoder))
    memory = f"reward.memory_gib = {_memory_gib():g}"  # a library that does not fit may not say so
    return Verdict(
        outcome="undecoded",
        message=f"the tokenizer cannot be loaded there, with {memory}: {caught.message}",
    )


def load_scorer(function: str, *, extract: str, soft_timeout_s: float) -> Scorer:
    """Jobs to verdicts, by math-verify or by the user's `module:function`."""
    if function == MATH_VERIFY:
        return _math_scorer(extract, soft_timeout_s)
    module, _, name = function.partition(":")
    if not module or not name:
        raise ValueError("it must be math_verify or module:function")
    found = vars(importlib.import_module(module)).get(name)
    if not callable(found):
        raise TypeError(f"module {module} has no function {name!r}")
    return lambda jobs: _call(found, jobs)


def judge(returned: object, num_expected: int) -> list[float] | str:
    """The rewards the user's function returned, or what is wrong with them."""
    expected = f"expected a list of {num_expected} numbers"
    if not isinstance(returned, Collection) or isinstance(returned, (str, bytes, dict, Set)):
        return f"returned {returned!r:.80}, {expected}"
    values = list(returned)
    if len(values) != num_expected:
        return f"returned {len(values)} rewards for {num_expected} responses, {expected}"
    wrong = next((v for v in values if not (isinstance(v, Real) and math.isfinite(v))), None)
    if wrong is not None or None in values:
        return f"returned {wrong!r:.80} as a reward, {expected}, all of them finite"
    return [float(value) for value in values]


def _math_scorer(extract: str, soft_timeout_s: float) -> Scorer:
    """Jobs to verdicts by math-verify, which only reward processes import."""
    from april_rl.rewards.math_reward import SoftTimeoutError, score_math

    def verdict(job: DecodedJob) -> Verdict:
        try:
            value = score_math(job.response, job.answer, how=extract, soft_timeout_s=soft_timeout_s)
        except SoftTimeoutError:
            return Verdict(outcome="soft_timeout", value=0.0)
        return Verdict(outcome="scored", value=value)

    return lambda jobs: [verdict(job) for job in jobs]


def _call(reward: Reward, jobs: Sequence[DecodedJob]) -> list[Verdict]:
    """One call of the user's function; the verdict is the same for all jobs when it fails."""
    values: list[float] | str = ""
    with Caught() as caught:
        returned = reward(
            [job.prompt for job in jobs],
            [job.response for job in jobs],
            [job.answer for job in jobs],
        )
        values = judge(returned, len(jobs))
    if caught.message:
        return [Verdict(outcome="raised", message=caught.message)] * len(jobs)
    if isinstance(values, str):
        return [Verdict(outcome="refused", message=values)] * len(jobs)
    return [Verdict(outcome="scored", value=value) for value in values]


def _limit(error: BaseException) -> str:
    """What to say of this process's memory when it was too little; else empty."""
    if not isinstance(error, MemoryError):
        return ""
    return f"; reward.memory_gib = {_memory_gib():g}"


def _memory_gib() -> float:
    """The address space this process may have."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] / GIB


def _place(error: BaseException, tb: TracebackType | None) -> str:
    """` (file:line)` of the user's code the error comes from; empty when it comes from here."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    machinery = ("<frozen", importlib.__file__)
    frames = [f for f in traceback.extract_tb(tb) if not f.filename.startswith(machinery)]
    if frames[-1].filename == __file__:
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
