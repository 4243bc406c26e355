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
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_models import write_tiny_qwen3

from april_rl.command_line import run as start
from april_rl.config import config_dir, register, to_config
from april_rl.errors import RunError

LEDGER_STATES = ("in_flight", "parked", "ready", "trained", "rejected", "dropped")


def write_task(folder: Path) -> Path:
    """Write a model and a data file into `folder`."""
    write_tiny_qwen3(folder / "model", hidden_size=64, num_layers=2, initializer_range=0.02)
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(6))
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(task: Path | None, run_dir: Path, *overrides: str) -> list[str]:
    """Return a command that trains four steps of four groups on `task`, α = 2; without `task`, only
    the overrides.
    """
    base = [sys.executable, "-m", "april_rl.train", f"hydra.run.dir={run_dir}"]
    if task is None:
        return [*base, *overrides]
    # A key may be overridden only once: leave out what the caller sets.
    named = {override.partition("=")[0] for override in overrides}
    settings = {
        "hydra.run.dir": run_dir,
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
        "runtime.threads": 1,
        "tracking.wandb": "disabled",  # W&B takes seconds to start; tests that need it turn it on
    }
    chosen = [f"{key}={value}" for key, value in settings.items() if key not in named]
    return [*base[:-1], *chosen, *overrides]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, in which reward functions of the tests are found, with
    `variables`.
    """
    found = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **found, **variables}


def run_all(
    programs: list[list[str]], cwd: Path, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run programs side by side, since a start mostly uses one core; return when all have ended."""
    with ThreadPoolExecutor(len(programs)) as threads:
        return list(threads.map(lambda args: run(args, cwd, **variables), programs))


def run(
    args: list[str], cwd: Path, *, timeout_s: float = 480, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in `cwd`, with `variables` in its environment, and return it ended."""
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
    """Start the program and send it SIGKILL when `is_time` returns true."""
    with subprocess.Popen(
        args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), cwd=cwd
    ) as program:
        deadline = time.monotonic() + 240
        while not is_time():
            assert program.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "it took too long"
            time.sleep(0.02)
        program.kill()


def refusal(task: Path, cwd: Path, *overrides: str) -> str:
    """Return the message of a run that is refused; runs in this process, to save the imports."""
    args = command(task, cwd / "run", "tracking.wandb=disabled", *overrides)[3:]
    plain = [arg for arg in args if not arg.startswith("hydra.")]
    register()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        composed = compose("train", overrides=plain)
    with pytest.raises(RunError) as caught:
        start(to_config(composed), cwd / "run", OmegaConf.to_container(composed, enum_to_str=True))
    return str(caught.value)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without one that is being written."""
    *lines, _ = (run_dir / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of steps that trained."""
    return [row for row in rows_of(run_dir) if "time/step_s" in row]


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
