"""The first half hour with a GPU: does everything work here, how fast, and what to set.

    python tools/gpu_acceptance.py [output=FOLDER] [parts=NAME,NAME,...]

Each part runs in processes of its own, so that one that fails does not end the others. What was
found is in acceptance.json and acceptance.md (one page: what was expected, what was measured, what
it means, what to set) after each part. Stop it when you like: the next start goes on with the parts
that are not there yet. Parts that are named run again. The folder is outputs/gpu_acceptance; every
command's log is in its logs/.

Without a GPU everything runs at tiny size, which shows that it works. Without vLLM the parts that
need no engine run. Exit status 0: nothing failed; 1: a part failed; 2: wrong arguments.
docs/gpu.md explains the page.

Parts, with their minutes on a GPU:
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import acceptance_learner
import acceptance_parts
import acceptance_runs
from acceptance_page import Outcome, Part, Results
from acceptance_session import FailedError, Machine, Measured, Session, SkippedError

# For the commands that are started: nothing in their logs but their own lines.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Part):
    """A part and the function that measures it; the first line of its docstring is shown."""

    measure: Callable[[Session], Measured]
    needs_engine: bool = True


def _step(
    name: str,
    title: str,
    minutes: float,
    measure: Callable[[Session], Measured],
    *,
    needs_engine: bool = True,
) -> Step:
    return Step(name=name, title=title, minutes=minutes, measure=measure, needs_engine=needs_engine)


STEPS: tuple[Step, ...] = (  # in order of value
    _step("environment", "environment", 1, acceptance_parts.environment, needs_engine=False),
    _step("gpu_tests", "GPU tests", 4, acceptance_parts.gpu_tests, needs_engine=False),
    _step("sync", "sleep, wake and weight sync", 2, acceptance_parts.sync),
    _step("smoke", "ten steps of qwen3_0_6b_smoke", 4, acceptance_runs.smoke),
    _step("alpha", "over-sampling: α 1, 1.5 and 2 on a long tail", 5, acceptance_runs.alpha),
    _step("ticks", "tick and abort times", 2, acceptance_parts.ticks),
    _step("learner", "learner: MFU", 2, acceptance_learner.learner, needs_engine=False),
    _step("offload", "offload", 1, acceptance_learner.offload, needs_engine=False),
    _step("async", "asynchronous scheduling", 4, acceptance_runs.asynchronous),
    _step("keep", "keep against re-prefill", 5, acceptance_runs.keep),
    _step("workers", "all devices against one", 4, acceptance_runs.workers),
)
NAMES = tuple(step.name for step in STEPS)


class UsageError(Exception):
    """A wrong argument."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts that are not there yet, or those that are named; return the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}{_listed()}")
        return 0
    try:
        folder, named = _parsed(arguments)
        session = _session(folder)
        results = Results.read(folder, session.machine)
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FailedError as error:
        print(f"error: the device cannot be looked at: {error}", file=sys.stderr)
        return 1
    try:
        _run(session, results, named)
    except KeyboardInterrupt:
        print("\ninterrupted: the next start goes on with this part", file=sys.stderr)
        return 130
    failed = [name for name, outcome in results.outcomes.items() if outcome.status == "failed"]
    print(f"\nresults     {results.json_path}\npage        {results.page_path}")
    if failed:
        again = f"python tools/gpu_acceptance.py output={folder} parts={','.join(failed)}"
        print(f"failed      {', '.join(failed)}; again: {again}")
    return 1 if failed else 0


def _parsed(arguments: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Return the folder, and the parts that are named, in this file's order."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = set(given) - {"output", "parts"}
    if unknown:
        raise UsageError(f"{sorted(unknown)[0]} is not an option: output=FOLDER or parts=A,B")
    asked = given["parts"].split(",") if "parts" in given else []
    wrong = [name for name in asked if name not in NAMES]
    if wrong:
        raise UsageError(f"parts={wrong[0]} is no part; there are {', '.join(NAMES)}")
    folder = Path(given.get("output") or "outputs/gpu_acceptance").resolve()
    return folder, tuple(name for name in NAMES if name in asked)


def _session(folder: Path) -> Session:
    """Look at the machine, in a separate process, so that this one holds nothing of the GPU."""
    found = Session(folder=folder, machine=_NOTHING).found("probe", "acceptance_device.py", "probe")
    return Session(folder=folder, machine=Machine(**found))


_NOTHING = Machine(
    device="cpu", name="", count=0, total_gib=0.0, without_engine="", without_pytest=""
)


def _run(session: Session, results: Results, named: Sequence[str]) -> None:
    """Run the parts that are due, and write both files after each."""
    machine = session.machine
    print(f"machine     {machine.count} × {machine.name}")
    if machine.without_engine:
        print(f"no engine   {machine.without_engine}: parts that need one are skipped")
    due = [step for step in STEPS if not named or step.name in named]
    if not named:
        there = [step.name for step in due if step.name in results.outcomes]
        due = [step for step in due if step.name not in there]
        if there:
            print(f"there       {', '.join(there)}; run again by parts=NAME")
    if due:
        minutes = sum(step.minutes for step in due if step.name != "workers" or machine.count > 1)
        duration = f"about {minutes:.0f} minutes" if machine.is_gpu else "tiny, without a GPU"
        print(f"to run      {len(due)} parts, {duration}")
    for number, step in enumerate(due, start=1):
        about = f", about {step.minutes:g} min" if machine.is_gpu else ""
        print(f"[{number:>2}/{len(due)}] {step.title}{about}", flush=True)
        outcome = _outcome(step, session)
        results.outcomes[step.name] = outcome
        results.write(STEPS)
        for row in outcome.rows:
            mark = "  LOOK" if row.is_as_expected is False else ""
            print(f"        {row.quantity}: {row.measured}{mark}")
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"        {outcome.status} in {outcome.took_s:.0f} s{reason}", flush=True)


def _outcome(step: Step, session: Session) -> Outcome:
    """Run a part; an error becomes its outcome, and the next part begins."""
    started = time.perf_counter()

    def ended(status: str, reason: str) -> Outcome:
        return Outcome(status=status, reason=reason, took_s=time.perf_counter() - started)

    if step.needs_engine and session.machine.without_engine:
        return ended("skipped", session.machine.without_engine)
    try:
        measured = step.measure(session)
    except SkippedError as reason:
        return ended("skipped", str(reason))
    except FailedError as error:
        return ended("failed", str(error))
    except Exception as error:  # of the part's own code: the other parts are worth having
        return ended("failed", f"{type(error).__name__}: {error}")
    return Outcome(
        status="done",
        took_s=time.perf_counter() - started,
        rows=tuple(row if session.is_gpu else row.without_gpu() for row in measured.rows),
        values=measured.values,
    )


def _listed() -> str:
    return "".join(f"  {step.name:<12}{step.minutes:>3g}  {step.title}\n" for step in STEPS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
