"""The reward function `code`: what share of its task's tests the program in a response passes."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

from april_rl.rewards.builtin.code_tests import Case, read_tests
from april_rl.rewards.builtin.probe import check_start, strongest
from april_rl.rewards.builtin.sandbox import Check, Level, Sandbox, SandboxError

BLOCK = re.compile(r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S | re.I)
THINK_END = "</think>"

Choice = Literal["auto", "bubblewrap", "landlock", "none"]
Value = Literal["share", "all"]


def code(
    prompts: Sequence[str],  # noqa: ARG001
    responses: Sequence[str],
    answers: Sequence[str],  # noqa: ARG001
    *,
    tests: Sequence[object],
    value: Value = "share",
    sandbox: Choice = "auto",
    timeout_s: float = 5.0,
    memory_gib: float = 1.0,
    concurrency: int = 1,
) -> list[float | None]:
    """Run the last ```python block of each response with its task's tests and return what passed.

    `tests`, a data column, holds asserts in Python, which run in the module of the response (it can
    also be imported as `solution`), or cases [{input, output}], for each of which the block runs as
    a program and what it prints is compared. `value` is the share of tests that pass, or 1 when all
    do. `timeout_s` is for all tests of a response together; `concurrency` responses run at a time.

    Failures: no block, code that raises, is killed by a limit or prints too much (16 MiB): its
    tests have failed, as have those that the time did not suffice for. A sandbox that does not
    start: None, no score. Raises ValueError for a row whose tests cannot be read, and SandboxError
    when no sandbox isolates files and network, unless `sandbox` is none.

    What it does not promise: asserts run in the interpreter of the response, so code that sets out
    to deceive them (an `__eq__` that is always true, a look at this module's frames) can pass them;
    it cannot with cases. The files that Python itself reads are readable.
    """
    if value not in get_args(Value):
        raise ValueError(f"value={value} of reward function code must be share or all.")
    chosen = open_sandbox(sandbox, memory_gib=memory_gib)

    def score(response: str, of_task: object) -> float | None:
        program = last_block(response)
        checks = read_tests(of_task)
        if program is None:
            return 0.0
        try:
            share = _share(chosen, program, checks, timeout_s=timeout_s)
        except SandboxError as error:
            logging.getLogger(__name__).warning("%s The response has no score.", error)
            return None
        return share if value == "share" else float(share == 1.0)

    with ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(score, responses, tests))


@functools.cache
def open_sandbox(choice: Choice, *, memory_gib: float) -> Sandbox:
    """Return the sandbox of this process, after its self-test at the first call.

    `auto` takes the strongest level that isolates files and network, a level's name that one, none
    limits of time, memory and output alone. Raises SandboxError when nothing isolates.
    """
    if choice not in get_args(Choice):
        raise ValueError(
            f"sandbox={choice} of reward function code must be auto, bubblewrap, landlock or none."
        )
    if choice == "none":
        sandbox = Sandbox(level=Level.RLIMITS, memory_gib=memory_gib)
        check_start(sandbox)
        return sandbox
    levels = list(Level) if choice == "auto" else [Level(choice)]
    isolation = strongest(levels, memory_gib=memory_gib)
    logging.getLogger(__name__).info(isolation.describe())
    return isolation.sandbox


def last_block(response: str) -> str | None:
    """Return the last complete ```python block after the thinking; None when there is none."""
    blocks = BLOCK.findall(response.rpartition(THINK_END)[2])
    return blocks[-1] if blocks else None


def _share(
    sandbox: Sandbox, program: str, tests: list[Check] | list[Case], *, timeout_s: float
) -> float:
    """Return the share of tests that a program passes, in [0, 1]."""
    checks = [test for test in tests if isinstance(test, Check)]
    if checks:
        finished = sandbox.run(program, timeout_s=timeout_s, tests=checks)
        return finished.num_passed / sum(check.counts for check in checks)
    cases = [test for test in tests if isinstance(test, Case)]
    deadline_s = time.monotonic() + timeout_s
    return sum(_is_met(sandbox, program, case, deadline_s=deadline_s) for case in cases) / len(
        cases
    )


def _is_met(sandbox: Sandbox, program: str, case: Case, *, deadline_s: float) -> bool:
    """Return whether a program ends well before the deadline and prints what the case expects."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return False
    finished = sandbox.run(program, timeout_s=left_s, stdin=case.input)
    return finished.exit_code == 0 and case.is_met(finished.output)
