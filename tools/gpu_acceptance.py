"""The first half hour with a GPU: does everything work here, how fast, and what to set.

    python tools/gpu_acceptance.py [output=FOLDER] [parts=NAME,NAME,...]

Each part runs in processes of its own, so that one that fails does not end the others. The results
are in acceptance.json and acceptance.md (one page: what was expected, what was measured, what it
means, what to set) after each part; calibration.json is for python -m april_rl rehearse. Stop it
when you like: the next start continues with the parts that are missing. Parts that are named run
again. The folder is outputs/gpu_acceptance; every command's log is in its logs/.

Without a GPU everything runs at tiny size, which shows that it works. Without vLLM the parts that
need no engine run. Exit status 0: nothing failed; 1: a part failed; 2: wrong arguments.
docs/gpu.md explains the page.

Parts, with their minutes on a GPU:
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from acceptance import parts, runs
from acceptance.page import Outcome, Results
from acceptance.session import NO_MACHINE, FailedError, Machine, Part, Session, SkippedError
from acceptance.tensor_parallel import tensor_parallel

# Settings for the commands that are started, so that their logs have only their own lines.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}

PARTS: tuple[Part, ...] = (  # the most valuable part comes first
    Part("environment", "environment", 1, parts.environment, needs_engine=False),
    Part("gpu_tests", "GPU tests", 4, parts.gpu_tests, needs_engine=False),
    Part("learner", "learner: MFU, compiled functions, offload", 4, parts.learner, False),
    Part("engine", "engine: speeds, weight sync in parts, sleep", 3, parts.engine),
    Part("async", "asynchronous scheduling and ticks", 6, runs.asynchronous),
    Part("certify", "certificate of numerics", 4, runs.certify),
    Part("smoke", "ten steps of qwen3_0_6b_smoke", 4, runs.smoke),
    Part("alpha", "over-sampling: α 1, 1.5 and 2 on a long tail", 5, runs.alpha),
    Part("graphs", "CUDA graphs against eager", 4, runs.graphs),
    Part("keep", "keep against re-prefill", 5, runs.keep),
    Part("fp8", "FP8 cache against 16 bits", 3, runs.fp8),
    Part("workers", "all devices against one", 4, runs.workers),
    Part("tensor_parallel", "engines of several GPUs, a rank killed", 10, tensor_parallel),
)
NAMES = tuple(part.name for part in PARTS)


class UsageError(Exception):
    """A wrong argument."""


def main(arguments: Sequence[str]) -> int:
    """Run the missing parts, or the named ones; return the exit status."""
    if {"-h", "--help"} & set(arguments):
        lines = (f"  {part.name:<16}{part.minutes:>3g}  {part.title}\n" for part in PARTS)
        print(f"{__doc__}{''.join(lines)}")
        return 0
    try:
        folder, named = _parse(arguments)
        machine = Machine(**Session(folder, NO_MACHINE).measure("device.probe"))
        results = Results.read(folder, machine)
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FailedError as error:
        print(f"error: the device cannot be examined: {error}", file=sys.stderr)
        return 1
    try:
        run(results, named)
    except KeyboardInterrupt:
        print("\ninterrupted: the next start continues with this part", file=sys.stderr)
        return 130
    failed = [name for name, outcome in results.outcomes.items() if outcome.status == "failed"]
    print(f"\nresults     {results.json_path}\npage        {results.page_path}")
    if failed:
        again = f"python tools/gpu_acceptance.py output={folder} parts={','.join(failed)}"
        print(f"failed      {', '.join(failed)}; again: {again}")
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Return the folder and the parts that are named."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = set(given) - {"output", "parts"}
    if unknown:
        raise UsageError(f"{sorted(unknown)[0]} is not an option: output=FOLDER or parts=A,B")
    named = tuple(given["parts"].split(",")) if "parts" in given else ()
    wrong = [name for name in named if name not in NAMES]
    if wrong:
        raise UsageError(f"parts={wrong[0]} is not a part; there are {', '.join(NAMES)}")
    return Path(given.get("output") or "outputs/gpu_acceptance").resolve(), named


def run(results: Results, named: Sequence[str]) -> None:
    """Run the parts that are due, and write the results after each."""
    session = Session(results.folder, results.machine)
    print(f"machine     {session.machine.count} × {session.machine.name}")
    if session.machine.without_engine:
        print(f"no engine   {session.machine.without_engine}: parts that need one are skipped")
    there = [name for name in NAMES if name in results.outcomes and not named]
    if there:
        print(f"there       {', '.join(there)}; run again by parts=NAME")
    due = [part for part in PARTS if part.name not in there and (not named or part.name in named)]
    for number, part in enumerate(due, start=1):
        about = f", about {part.minutes:g} min" if session.is_gpu else ""
        print(f"[{number:>2}/{len(due)}] {part.title}{about}", flush=True)
        outcome = outcome_of(part, session)
        results.outcomes[part.name] = outcome
        results.write(PARTS)
        for row in outcome.rows:
            mark = "  LOOK" if row.is_as_expected is False else ""
            print(f"        {row.quantity}: {row.measured}{mark}")
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"        {outcome.status} in {outcome.took_s:.0f} s{reason}", flush=True)


def outcome_of(part: Part, session: Session) -> Outcome:
    """Run a part; an error becomes its outcome, and the next part begins."""
    started = time.perf_counter()

    def outcome(status: str, reason: str) -> Outcome:
        return Outcome(status=status, reason=reason, took_s=time.perf_counter() - started)

    if part.needs_engine and session.machine.without_engine:
        return outcome("skipped", session.machine.without_engine)
    try:
        measured = part.measure(session)
    except SkippedError as reason:
        return outcome("skipped", str(reason))
    except FailedError as error:
        return outcome("failed", str(error))
    except Exception as error:  # the part's own code failed: the other parts are still worth having
        return outcome("failed", f"{type(error).__name__}: {error}")
    return Outcome(
        status="done",
        took_s=time.perf_counter() - started,
        rows=tuple(row if session.is_gpu else row.without_gpu() for row in measured.rows),
        values=measured.values,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
