"""Whole runs of two workers each, and their files."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from command_line import command, run, write_task
from equal_runs import SETTINGS

TWO_WORKERS = ("runtime.num_workers=2", "evaluation.max_prompts=2")
# Two engines: DAPO with a reference, and two passes over two minibatches of a batch.
DATA_PARALLEL = (
    *TWO_WORKERS,
    *SETTINGS,
    "engine.tensor_parallel_size=1",
    "algorithm=dapo",
    "algorithm.kl=k3",
    "algorithm.kl_coefficient=0.05",
    "trainer.num_minibatches=2",
    "trainer.num_passes=2",
    "optimizer.schedule=linear",
    "algorithm.entropy_target=10",
    "learner.offload=all",
    "checkpoint.every_steps=2",
    "checkpoint.export_every_steps=2",
    "checkpoint.keep_last=3",
    "tracking.wandb=offline",
    "profiler.steps=[2]",
)
# One engine of two workers: GSPO on adapters, with over-sampling, a low staleness
# cap, and a group whose scores come after the cap has passed.
TENSOR_PARALLEL = (
    *TWO_WORKERS,
    "engine.tensor_parallel_size=2",
    "rollout.resume=keep",
    "algorithm=gspo",
    "lora.rank=4",
    "rollout.over_sampling_factor=1.5",
    "rollout.max_staleness=1",
    "rollout.on_stale=mask",
    "reward.function=reward_functions:even_length_but_late",
    "reward.args={late: '0+0=', metrics: together/metrics.jsonl, num_rows: 4}",
    "reward.num_processes=5",
    "reward.hard_timeout_s=200",
    "trainer.num_minibatches=2",
    "trainer.num_steps=6",
    "evaluation.every=100",
)
ENGINES = {"first": "2 engines", "together": "1 engine of 2 workers"}


@dataclass(frozen=True, kw_only=True)
class TwoWorkers:
    """Finished runs of two workers by name, and their files."""

    folder: Path
    done: dict[str, subprocess.CompletedProcess[str]]
    shared_memory: set[str]  # names

    def dir_of(self, name: str) -> Path:
        """Return the run's directory; check that the run has ended normally."""
        assert self.done[name].returncode == 0, self.done[name].stderr[-3000:]
        return self.folder / name


def run_two_workers(folder: Path) -> TwoWorkers:
    """Run two runs in parallel: neither may take sockets or shared memory from the other, and each
    slows the other down.

    The first run's environment names a cluster elsewhere.
    """
    task, here = write_task(folder), Path(__file__).parent
    variables = {
        "RAY_ADDRESS": "127.0.0.1:1",
        "LOADED_FILE": str(folder / "loaded"),
        "PYTHONPATH": f"{here / 'at_exit'}:{here}",
    }
    before = set(Path("/dev/shm").iterdir())
    first = command(task, folder / "first", *DATA_PARALLEL)
    together = command(task, folder / "together", *TENSOR_PARALLEL)
    with ThreadPoolExecutor() as threads:
        other = threads.submit(run, together, folder)
        done = {"first": run(first, folder, **variables), "together": other.result()}
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    # These runs have ended, so a file that a process still has open belongs to another program.
    in_use = "".join(mapped_files())
    left = {name for name in left if f"/dev/shm/{name}\n" not in in_use}
    return TwoWorkers(folder=folder, done=done, shared_memory=left)


def mapped_files() -> Iterator[str]:
    """Yield the memory maps of every process, which name the files."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended in the meantime, or belongs to another user
            yield maps.read_text()


def has_row(run_dir: Path, *, step: int) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.is_file() and f'{{"step": {step},' in path.read_text()
