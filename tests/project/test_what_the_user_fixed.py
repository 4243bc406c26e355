"""The libraries, commands and features that this project was asked to have: none may be removed."""

import configparser
import re
import shlex
import subprocess
import sys

import pytest
from composed_config import load
from hydra import compose, initialize_config_dir
from source_tree import PACKAGE, ROOT, definitions, tree_of

from april_rl.config import config_dir, register
from april_rl.start.commands import COMMANDS
from april_rl.training.algorithm.losses import loss_function

PACKAGES = "accelerate datasets hydra-core math-verify torch transformers wandb"
TOP_LEVEL = "april_rl configs recipes tests tools setup.cfg Makefile"
SLEEPS = ("sleep", "wake_weights", "load_weights", "wake_kv_cache")


def test_the_command_of_training_composes_the_recipe() -> None:
    command = "-m april_rl.train +recipe=qwen3_4b_dapo --cfg job --package rollout"
    done = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, "over_sampling_factor: 1.25" in done.stdout) == (0, True), done.stderr


def test_a_sweep_goes_over_the_over_sampling_factor() -> None:
    register()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        swept = compose("train", ["+recipe=tiny_cpu", "+sweep=alpha"], return_hydra_config=True)
    assert str(swept.hydra.sweeper.params).count("over_sampling_factor") >= 3
    given = load("+recipe=tiny_cpu", "rollout.over_sampling_factor=3").rollout
    assert given.over_sampling_factor == 3


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_a_loss_is_a_choice_that_trains(name: str) -> None:
    assert callable(loss_function(load("+recipe=tiny_cpu", f"algorithm={name}").algorithm))


def test_w_and_b_has_dashboards() -> None:
    assert "dashboard" in COMMANDS


def test_the_engine_sleeps_and_gets_the_weights_again_when_it_wakes() -> None:
    """Tests of the engine and of the runtime try what they do; these are their names."""
    engine = definitions(tree_of(PACKAGE / "training" / "engine" / "vllm_engine.py"))
    assert {f"VllmEngine.{name}" for name in SLEEPS} <= {name for name, _ in engine}
    worker = (PACKAGE / "training" / "runtime" / "worker.py").read_text()
    assert re.search(r"engine\.sleep\(\)\n.*\n.*self\._update\(", worker)
    assert re.search(r"wake_weights\(\)\n.*send_weights\n.*send\(.*\n.*\n.*wake_kv_cache", worker)


def test_the_packages_are_required() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = set(re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.MULTILINE))
    assert set(PACKAGES.split()) <= required
    # The engine has a build for each kind of machine, so the extra of the machine requires it.
    extras = setup["options.extras_require"]
    assert all(re.match(r"\s*vllm\b", extras[name]) for name in ("cpu", "cuda", "rocm"))


def test_the_top_level_is_as_it_was_asked_for() -> None:
    assert [name for name in TOP_LEVEL.split() if not (ROOT / name).exists()] == []
