"""The command line from a wheel works in any directory, with its configs and recipes."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from source_tree import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return the unpacked wheel, as pip would install it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def print_config(cwd: Path, path: Path | None) -> str:
    """Return `--cfg job` of the tiny recipe, with `path` searched before everything installed."""
    env = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    code = (
        "import april_rl.start.command_line as c, sys; print(c.__file__, file=sys.stderr); c.main()"
    )
    args = [sys.executable, "-c", code, "+recipe=tiny_cpu", "--cfg", "job"]
    done = subprocess.run(args, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(path or ROOT) in done.stderr
    return done.stdout


def test_wheel_checkout_and_editable_install_compose_the_same_configuration(wheel, tmp_path):
    """Fails when the package data in setup.cfg lacks a folder."""
    expected = print_config(ROOT, None)
    assert "path: builtin:tiny" in expected
    assert print_config(tmp_path, wheel) == expected
    assert print_config(tmp_path, ROOT) == expected
    assert print_config(tmp_path, None) == expected


def test_every_recipe_and_every_choice_of_configs_is_in_the_wheel(wheel):
    """Fails when the package data only covers one level of folders."""
    for folder in ("configs", "recipes"):
        in_checkout = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.yaml")}
        root = wheel / "april_rl" / folder
        assert {path.relative_to(root) for path in root.rglob("*.yaml")} == in_checkout


def test_the_names_of_other_trainers_are_in_the_wheel(wheel):
    page = Path("docs", "coming_from.md")
    assert (wheel / "april_rl" / page).read_text() == (ROOT / page).read_text()


def test_the_tiny_policy_and_its_problems_are_in_the_wheel(wheel):
    """Fails when the package data lacks a file: the first run would look for it on the hub."""
    for folder in ("task/tiny/policy", "task/tiny/problems"):
        in_checkout = {path.name for path in (ROOT / "april_rl" / folder).iterdir()}
        assert {path.name for path in (wheel / "april_rl" / folder).iterdir()} == in_checkout
        assert in_checkout


def test_an_installed_wheel_prints_a_configuration_with_only_hydra_and_psutil(wheel, tmp_path):
    """Fails when composing a configuration imports another package."""
    for name in ("hydra", "omegaconf", "antlr4", "yaml", "packaging", "psutil"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (tmp_path / name).symlink_to(Path(spec.origin).parent)
    code = (
        f"import sys; sys.path[:0] = [{str(wheel)!r}, {str(tmp_path)!r}]\n"
        "from april_rl.start.command_line import main; main()"
    )
    args = [sys.executable, "-I", "-S", "-c", code, "+recipe=tiny_cpu", "--cfg", "job"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "path: builtin:tiny" in done.stdout
