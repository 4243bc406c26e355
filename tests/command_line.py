"""The program as a person starts it, on a random model and sixty sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiny_models import write_tiny_qwen3


def write_task(folder: Path) -> Path:
    """A model and a data file in `folder`."""
    write_tiny_qwen3(folder / "model", hidden_size=64, num_layers=2, initializer_range=0.02)
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(6))
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(task: Path | None, run_dir: Path, *overrides: str) -> list[str]:
    """A run of four steps of four groups on `task`, α = 2; only the overrides when it is None."""
    base = [sys.executable, "-m", "april_rl.train", f"hydra.run.dir={run_dir}"]
    if task is None:
        return [*base, *overrides]
    # Later overrides of a key win only as the last word: leave out what the caller sets.
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
        "tracking.wandb": "disabled",  # it takes seconds to start: for the tests that look at it
    }
    chosen = [f"{key}={value}" for key, value in settings.items() if key not in named]
    return [*base[:-1], *chosen, *overrides]


def environment() -> dict[str, str]:
    """So that reward functions of the tests are found."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}


def run_all(programs: list[list[str]], cwd: Path) -> list[subprocess.CompletedProcess[str]]:
    """The ended programs, which ran side by side: much of a start keeps one core busy."""
    with ThreadPoolExecutor(len(programs)) as threads:
        return list(threads.map(lambda args: run(args, cwd), programs))


def run(args: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """The ended program."""
    return subprocess.run(
        args, capture_output=True, text=True, env=environment(), cwd=cwd, timeout=480, check=False
    )


def run_until_killed(args: list[str], cwd: Path, is_time: Callable[[], bool]) -> None:
    """Start the program and end it with SIGKILL when it is time."""
    with subprocess.Popen(
        args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), cwd=cwd
    ) as program:
        deadline = time.monotonic() + 240
        while not is_time():
            assert program.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "it took too long"
            time.sleep(0.02)
        program.kill()


def run_with(
    act: Callable[[], None], args: list[str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """The ended program, after `act` was called every few milliseconds while it ran."""
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(run, args, cwd)
        while not ended.done():
            act()
            time.sleep(0.02)
        return ended.result()
