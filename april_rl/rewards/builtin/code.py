"""`code`: the share of its task's tests that the program in a response passes, run in a sandbox."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

from april_rl.rewards.builtin.code_tests import Case, read_tests
from april_rl.rewards.builtin.probe import Isolation, probe, strongest
from april_rl.rewards.builtin.sandbox import Check, Level, Sandbox, SandboxError
from april_rl.rewards.loading import Built, Context

BLOCK = re.compile(r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S | re.I)
THINK_END = "</think>"

Choice = Literal["auto", "bubblewrap", "landlock", "none"]
Value = Literal["share", "all"]


def build(
    context: Context,
    *,
    column: str = "tests",
    value: Value = "share",
    sandbox: Choice = "auto",
    timeout_s: float = 5.0,
    memory_gib: float = 1.0,
    concurrency: int = 1,
) -> Built:
    """Return the reward function, with the result of the sandbox's self-test as its note.

    `column` is the data column with the tests. `sandbox`: auto takes the strongest one that
    isolates files and network; none only limits time, memory and output. Raise SandboxError when
    nothing isolates, and ValueError for invalid arguments.
    """
    if value not in get_args(Value):
        raise ValueError(f"args.value={value} must be share or all")
    if timeout_s >= context.hard_timeout_s:
        raise ValueError(
            f"args.timeout_s={timeout_s:g} must be below reward.hard_timeout_s="
            f"{context.hard_timeout_s:g}, after which the reward process is killed"
        )
    isolation = open_sandbox(sandbox, memory_gib=memory_gib)
    code = Code(
        sandbox=isolation.sandbox, value=value, timeout_s=timeout_s, concurrency=concurrency
    )

    def reward(
        prompts: Sequence[str],  # noqa: ARG001
        responses: Sequence[str],
        answers: Sequence[str],  # noqa: ARG001
        **columns: Sequence[object],
    ) -> list[float | None]:
        return code.score(responses, columns[column])

    return Built(
        reward=reward,
        columns=(column,),
        note=isolation.describe(),
        last_failure=lambda: code.last_failure,
    )


@dataclass(slots=True, kw_only=True)
class Code:
    """Runs the programs in responses.

    Asserts can be deceived: they run in the interpreter of the response, so code that sets out to
    (an `__eq__` that is always true, a look at the frames of jail.py) can pass them. Cases {input,
    output} cannot. Files that Python itself reads are readable.
    """

    sandbox: Sandbox
    value: Value  # share: of the tests that pass; all: 1 when all pass, else 0
    timeout_s: float  # for all tests of a response
    concurrency: int  # responses that run at the same time
    last_failure: str = ""  # why a response had no score

    def score(self, responses: Sequence[str], tests: Sequence[object]) -> list[float | None]:
        """Run the last ```python block of each response with its task's tests.

        Asserts run in the module of the response, which can also be imported as `solution`. For
        cases {input, output} the block runs as a program, and what it prints is compared.

        Tests count as failed when there is no block, and when the code raises, exceeds a limit or
        prints too much (16 MiB); so do tests for which no time was left. When the sandbox does not
        start the score is None. Raise ValueError for tests that cannot be read.
        """
        with ThreadPoolExecutor(self.concurrency) as threads:
            return list(threads.map(self._score_one, responses, tests))

    def _score_one(self, response: str, tests: object) -> float | None:
        checks = read_tests(tests)
        program = last_block(response)
        if program is None:
            return 0.0
        try:
            share = _share(self.sandbox, program, checks, timeout_s=self.timeout_s)
        except SandboxError as error:
            self.last_failure = str(error)
            return None
        return share if self.value == "share" else float(share == 1.0)


@functools.cache
def open_sandbox(choice: Choice, *, memory_gib: float) -> Isolation:
    """Return the sandbox of this process; the first call runs its self-test.

    Raise SandboxError when nothing isolates, unless `choice` is none.
    """
    if choice not in get_args(Choice):
        raise ValueError(f"args.sandbox={choice} must be auto, bubblewrap, landlock or none")
    if choice == "none":
        return probe(Sandbox(level=Level.RLIMITS, memory_gib=memory_gib))
    levels = list(Level) if choice == "auto" else [Level(choice)]
    return strongest(levels, memory_gib=memory_gib)


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
    """Return whether a program ends in time without an error and prints what the case expects."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return False
    finished = sandbox.run(program, timeout_s=left_s, stdin=case.input)
    return finished.exit_code == 0 and case.is_met(finished.output)
