"""Runs of the program as a user starts it, on a random model and sixty sums."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_qwen3

from april_rl.config.store import as_plain, compose_overrides, to_config
from april_rl.errors import RunError
from april_rl.run.checkpointing.run_lock import own
from april_rl.start.command_line import run as start

LEDGER_STATES = ("in_flight", "parked", "ready", "trained", "rejected", "dropped")


def write_task(folder: Path) -> Path:
    write_tiny_qwen3(folder / "model", hidden_size=64, num_layers=2, initializer_range=0.02)
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(6))
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(task: Path | None, run_dir: Path, *overrides: str) -> list[str]:
    """Return a command that trains four steps of four groups on `task` with α = 2; without `task`,
    the overrides give the data.
    """
    settings: dict[str, object] = {
        "hydra.run.dir": run_dir,
        "runtime.threads": 1,  # more threads would spin while they wait for each other
        "tracking.wandb": "disabled",  # W&B takes seconds to start; tests that need it turn it on
    }
    if task is not None:
        settings |= _settings_of(task)
    # A key may be overridden only once: leave out what the caller sets.
    named = {override.partition("=")[0] for override in overrides}
    chosen = [f"{key}={value}" for key, value in settings.items() if key not in named]
    return [sys.executable, "-m", "april_rl.train", *chosen, *overrides]


def _settings_of(task: Path) -> dict[str, object]:
    return {
        "model.path": task / "model",
        "data.path": task / "sums.jsonl",
        "data.template": "plain",
        "data.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 96,
        "rollout.group_size": 4,
        "rollout.over_sampling_factor": 2,
        "rollout.tick_steps": 2,
        "learner.max_tokens": 1024,
        "trainer.num_steps": 4,
        "trainer.num_groups": 4,
        "optimizer.lr": 1e-3,
        "engine.kv_cache_gib": 0.25,
        "reward.function": "reward_functions:even_length",
        "reward.num_processes": 1,
        "+evaluation.sets.held_out": f"{{path: {task / 'sums.jsonl'}}}",
        "evaluation.max_prompts": 8,
        "evaluation.every": 2,
        "runtime.device": "cpu",
    }


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `variables`; it lets programs find the tests' reward
    functions.
    """
    found = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **found, **variables}


def run_all(
    programs: list[list[str]], cwd: Path, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run programs in parallel, since a start mostly uses one core; return when all have ended."""
    with ThreadPoolExecutor(len(programs)) as threads:
        return list(threads.map(lambda args: run(args, cwd, **variables), programs))


def run(
    args: list[str], cwd: Path, *, timeout_s: float = 480, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in `cwd` with `variables` in its environment; return it after its end."""
    return subprocess.run(
        args,
        capture_output=True,
        text=True,
        env=environment(**variables),
        cwd=cwd,
        timeout=timeout_s,
        check=False,
    )


def run_until_killed(args: list[str], cwd: Path, is_time: Callable[[], bool]) -> None:
    with subprocess.Popen(
        args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), cwd=cwd
    ) as program:
        deadline = time.monotonic() + 240
        while not is_time():
            assert program.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "it took too long"
            time.sleep(0.02)
        program.kill()


def run_here(task: Path | None, run_dir: Path, *overrides: str) -> None:
    """Train in this process, which has already imported everything, without Ray.

    This is for promises that do not concern the command itself.
    """
    words = _words(task, run_dir, "runtime.ray=false", *overrides)
    composed = compose_overrides(words)
    with own(run_dir):
        start(to_config(composed), run_dir, as_plain(composed))


def refusal(task: Path | None, cwd: Path, *overrides: str) -> str:
    """Return the error of a run that is refused; the run is in this process, to save
    the imports.
    """
    composed = compose_overrides(_words(task, cwd / "run", *overrides))
    with pytest.raises(RunError) as caught:
        start(to_config(composed), cwd / "run", as_plain(composed))
    return str(caught.value)


def _words(task: Path | None, run_dir: Path, *overrides: str) -> list[str]:
    """Return the settings of `command` without those that only Hydra's program reads."""
    words = command(task, run_dir, *overrides)[3:]
    return [word for word in words if not word.startswith("hydra.")]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without one that is still being written."""
    *lines, _ = (run_dir / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of steps that trained."""
    return [row for row in rows_of(run_dir) if "time/step_s" in row]


def check_ledger(rows: list[dict[str, Any]]) -> None:
    """Check that rows of steps with four groups each have lost no group and trained none twice."""
    for row in rows:
        assert row["ledger/opened"] == sum(row[f"ledger/{state}"] for state in LEDGER_STATES)
        assert row["ledger/trained"] == 4 * row["step"]


def groups_of(run_dir: Path) -> list[list[dict[str, Any]]]:
    """Return the trained samples that a run has written, by group."""
    lines = [
        line
        for path in sorted(run_dir.glob("samples/step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    by_group: dict[int, list[dict[str, Any]]] = {}
    for sample in map(json.loads, lines):
        by_group.setdefault(sample["prompt_id"], []).append(sample)
    return list(by_group.values())
