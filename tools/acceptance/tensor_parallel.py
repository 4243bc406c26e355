"""The part for several GPUs: engines of two and of four, and a rank that is killed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kills.run import Run, name_of, processes, rows_of

from acceptance.runs import mismatch_row, smoke_settings
from acceptance.session import Measured, Row, Session, SkippedError
from april_rl.run.tracking.metrics_file import read_metrics

_NUM_GPUS = 4  # fewest GPUs for this part
_SIZES = (2, 4)  # engine.tensor_parallel_size
_NUM_STEPS = 5  # there are four weight syncs between them
_MISMATCH = "mismatch/logprob_abs_mean"


def tensor_parallel(session: Session) -> Measured:
    """Train with engines of two and of four GPUs, and once more with a rank that is killed."""
    count = session.machine.count if session.is_gpu else 0
    if count < _NUM_GPUS:
        raise SkippedError(f"it needs {_NUM_GPUS} GPUs; this machine has {count}")
    num_workers = count - count % _NUM_GPUS
    rows, values = list[Row](), dict[str, Any]()
    for size in _SIZES:
        found = _train(session, size, num_workers)
        values[f"size_{size}"] = {"mismatch": mismatch_of(found)}
        rows += rows_of_run(size, found)
    killed = session.measure(
        "tensor_parallel.kill_rank",
        folder=session.folder / "killed",
        settings=[
            *("runtime.device=gpu", f"runtime.num_workers={num_workers}"),
            f"engine.tensor_parallel_size={_SIZES[0]}",
        ],
    )
    return Measured([*rows, row_of_kill(killed)], values | {"killed": killed})


def _train(session: Session, size: int, num_workers: int) -> list[dict[str, Any]]:
    """Return the steps of a run at so large a learning rate that a lost weight sync shows."""
    settings, _ = smoke_settings(session)
    name = f"tensor_parallel_{size}"
    run_dir = session.folder / name
    shutil.rmtree(run_dir, ignore_errors=True)
    settings += [
        *(f"runtime.num_workers={num_workers}", f"engine.tensor_parallel_size={size}"),
        *(f"trainer.num_steps={_NUM_STEPS}", "optimizer.lr=1e-4", "learner.max_mismatch=100"),
        *("engine.cuda_graphs=true", "evaluation.every=100", f"hydra.run.dir={run_dir}"),
    ]
    train = (sys.executable, "-m", "april_rl.train", "+recipe=qwen3_0_6b_smoke")
    session.run(name, *train, *settings)
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/step_s" in row]


def mismatch_of(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the mismatch of each step that has one."""
    return [found for row in steps if (found := row.get(_MISMATCH)) is not None]


def rows_of_run(size: int, steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the lines about a run with engines of `size` GPUs."""
    name = f"engines of {size} GPUs"
    return [
        Row(
            f"{name}: steps",
            f"{len(steps)}, the last one took {steps[-1]['time/step_s']:.2f} s",
            f"{_NUM_STEPS}",
            len(steps) == _NUM_STEPS,
            "ranks that drift apart end the run",
            holds_anywhere=True,
        ),
        mismatch_row(f"{name}: mismatch, before and after weight syncs", mismatch_of(steps)),
    ]


def kill_rank(folder: str, settings: Sequence[str]) -> dict[str, Any]:
    """Train the tiny task, kill the last worker after a step, and return how the run ended."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    run = Run(Path(folder), settings, num_steps=_NUM_STEPS)
    run.begin_life()
    program = run.start()
    run.wait_for_step(program, after=1)
    workers = [each for each in processes(run.mark(1)) if "ray::Worker" in name_of(each)]
    if workers:
        workers[-1].kill()
    return {
        "num_workers": len(workers),
        "status": run.end(program),
        "has_restarted": "resumed from" in run.output(),
        "steps": [int(row["step"]) for row in rows_of(run.dir) if "time/step_s" in row],
    }


def row_of_kill(found: Mapping[str, Any]) -> Row:
    """Return whether the run continued after the kill and trained every step once."""
    is_whole = found["steps"] == [*range(1, _NUM_STEPS + 1)] and found["status"] == 0
    return Row(
        "one rank killed",
        f"{found['num_workers']} workers before it; "
        f"{'restarted' if found['has_restarted'] else 'not restarted'}, exit status "
        f"{found['status']}, steps {' '.join(map(str, found['steps']))}",
        f"restarts by itself, steps 1 to {_NUM_STEPS} once each, exit status 0",
        bool(found["num_workers"]) and found["has_restarted"] and is_whole,
        "if not: logs/kill_rank.log, and output.txt in killed/",
        holds_anywhere=True,
    )
