"""`code`: the share of its task's tests that the program in a response passes, run in a sandbox."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from april_rl.jail.probe import Isolation, check_isolation, probe
from april_rl.jail.sandbox import Check, Level, Sandbox, SandboxError
from april_rl.task.rewards.code.blocks import last_block
from april_rl.task.rewards.code.cases import Case, FunctionCall, ValueCheck, calling, sending
from april_rl.task.rewards.code.task_tests import ANY_NAME, ANY_NAME_NONE, IDLE_PROGRAMS, read_tests
from april_rl.task.rewards.loading import Reward, RewardContext

WALL_PER_CPU = 2.0  # wall time that a run may take, per second of its CPU time limit
SLACK_S = 1.0  # time between the limit of a response here and the end of its reward process

Value = Literal["share", "all"]


def build(
    context: RewardContext,
    *,
    column: str = "tests",
    entry_column: str | None = None,
    value: Value = "share",
    sandbox: Level = "landlock",
    timeout_s: float = 4.0,
    memory_gib: float = 1.0,
) -> Reward:
    """Return the reward function, with the result of the sandbox's self-test as its note.

    `column` is the data column with the tests, `entry_column` the one with the name of the function
    that they call, for forms that do not say it. `sandbox`: landlock isolates files, network and
    processes; none isolates no files. Raise SandboxError when landlock does not isolate here, and
    ValueError for invalid arguments.
    """
    if value not in get_args(Value):
        raise ValueError(f"args.value={value} must be share or all")
    limit_s = context.hard_timeout_s - SLACK_S
    if not 0 < timeout_s * WALL_PER_CPU <= limit_s:
        raise ValueError(
            f"args.timeout_s={timeout_s:g} must be above 0 and at most {limit_s / WALL_PER_CPU:g} "
            f"with reward.hard_timeout_s={context.hard_timeout_s:g}: a run may take "
            f"{WALL_PER_CPU:g} times as much wall time"
        )
    isolation = open_sandbox(sandbox, memory_gib=memory_gib)
    code = Code(sandbox=isolation.sandbox, value=value, timeout_s=timeout_s, limit_s=limit_s)

    def reward(
        prompts: Sequence[str],  # noqa: ARG001
        responses: Sequence[str],
        answers: Sequence[str],  # noqa: ARG001
        **columns: Sequence[object],
    ) -> list[float | None]:
        entries = columns[entry_column] if entry_column else [None] * len(responses)
        return list(map(code.score, responses, columns[column], entries))

    return Reward(
        call=reward,
        columns=(column, *([entry_column] if entry_column else ())),
        note=isolation.describe(),
        last_failure=lambda: code.last_failure,
    )


@dataclass(slots=True, kw_only=True)
class Code:
    """Runs the programs in responses.

    Results of cases, and values that an assert compares with a literal, are compared here. Other
    asserts can be deceived by code that sets out to: by an `__eq__` that is always true, or by
    reporting in their name. Files that Python itself reads are readable.
    """

    sandbox: Sandbox
    value: Value  # share: of the tests that pass; all: 1 when all pass, else 0
    timeout_s: float  # CPU time of one case, or of all asserts of a response
    limit_s: float  # wall time limit of a response
    last_failure: str = ""  # why a response had no score

    def score(self, response: str, tests: object, entry: object = None) -> float | None:
        """Run the last block of Python in a response with its task's tests; return their share.

        Asserts run in the module of the response, which can also be imported as `solution`. For
        cases {input, output} the block runs as a program, and what it prints is compared, or a
        function of it is called, and what it returns is compared.

        Tests count as failed when there is no block, and when the code raises, exceeds a limit or
        prints too much (16 MiB); so do cases after one that reached a limit, and cases for which
        the program left no time. When the sandbox does not start, or the machine is too slow to run
        all cases, the score is None. Raise ValueError for tests that cannot be read, and for one
        that an idle program passes.
        """
        read = read_tests(tests, entry)
        checks = [test for test in read if isinstance(test, ValueCheck)]
        cases = [test for test in read if not isinstance(test, ValueCheck)]
        program = last_block(response)
        if program is None:
            return 0.0
        passed: Sequence[ValueCheck | Case | FunctionCall]
        try:
            if cases:
                passed = self._passed_cases(program, cases)
            else:
                passed = self._passed_checks(program, checks)
                if passed and program.strip() == ANY_NAME:  # a test of `is not None` can fail
                    again = self._passed_checks(ANY_NAME_NONE, checks)
                    passed = [check for check in passed if check in again]
        except SandboxError as error:
            self.last_failure = str(error)
            return None
        share = len(passed) / (len(cases) or sum(check.counts for check in checks))
        value = share if self.value == "share" else float(share == 1.0)
        if value > 0.0 and program.strip() in IDLE_PROGRAMS:
            shown = f"the program {program.strip()!r}"
            if program.strip() == ANY_NAME:
                shown = "any program that defines the function"
            raise ValueError(
                f"{shown} passes {passed[0]}, so it is not a test: fix the row, or leave it out"
            )
        return value

    def _passed_checks(self, program: str, checks: Sequence[ValueCheck]) -> list[ValueCheck]:
        tests = [Check(source=check.sends, counts=check.counts) for check in checks]
        with self.sandbox.start(sending(program), timeout_s=self.timeout_s, tests=tests) as opened:
            finished = opened.run(wall_s=self.timeout_s * WALL_PER_CPU)
        return [checks[n] for n in finished.passed if checks[n].is_met(finished.output)]

    def _passed_cases(
        self, program: str, cases: Sequence[Case | FunctionCall]
    ) -> list[Case | FunctionCall]:
        """Return the cases for which a program ends without an error and gives what they expect.

        When the response's limit ends before the cases do, and the program itself used most of it,
        running or sleeping, the cases left have failed. Raise SandboxError when it did not: then
        the machine was slow, or the cases are too many for the limit.
        """
        end_s = time.monotonic() + self.limit_s
        whole_s = self.timeout_s * WALL_PER_CPU
        passed, used_s = [], 0.0
        code = calling(program) if isinstance(cases[0], FunctionCall) else program
        with self.sandbox.start(code, timeout_s=self.timeout_s) as opened:
            for number, case in enumerate(cases):
                wall_s = min(whole_s, end_s - time.monotonic())
                finished = opened.run(case.input, wall_s=wall_s) if wall_s > 0 else None
                used_s += finished.used_s if finished else 0.0
                is_cut = finished is None or (finished.limit == "wall" and wall_s < whole_s)
                if is_cut and used_s * WALL_PER_CPU <= self.limit_s:
                    raise SandboxError(
                        f"Only {number} of {len(cases)} cases ran in {self.limit_s:g} s, of which "
                        f"the program used {used_s:.1f} s; raise reward.hard_timeout_s, or keep "
                        "fewer cases of a task."
                    )
                if finished is None:
                    break
                is_met = finished.exit_code == 0 and case.is_met(finished.output)
                if is_met:
                    passed.append(case)
                if finished.limit or (self.value == "all" and not is_met):
                    break
        return passed


@functools.cache
def open_sandbox(level: Level, *, memory_gib: float) -> Isolation:
    """Return a sandbox after its self-test; raise SandboxError if it does not isolate."""
    if level not in get_args(Level):
        raise ValueError(f"args.sandbox={level} must be landlock or none")
    sandbox = Sandbox(level=level, memory_gib=memory_gib)
    return probe(sandbox) if level == "none" else check_isolation(sandbox)
