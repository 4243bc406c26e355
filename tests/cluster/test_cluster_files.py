"""The files of tools/cluster agree with the project and with each other."""

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml
from source_tree import ROOT

from april_rl import __version__
from april_rl.config.store import compose_overrides

FOLDER = ROOT / "tools" / "cluster"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
IMAGE = re.compile(r"registry\.example\.com/april_rl:([\d.]+)")


def loaded(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def kuberay_groups() -> list[dict[str, Any]]:
    cluster = loaded("kuberay.yaml")["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_recipes_and_paths_in_the_files_exist(path):
    text = path.read_text()
    recipes = set(re.findall(r"(?:\+recipe=|RECIPE[=:] ?)(\w+)", text)) - {"NAME"}
    assert [name for name in recipes if not (ROOT / "recipes" / f"{name}.yaml").is_file()] == []
    named = set(re.findall(r"(?:tools|requirements|docs)/[\w/]+(?:\.\w+)?", text))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_image_has_one_name_and_the_version_of_the_package():
    images = [IMAGE.findall(path.read_text()) for path in FILES]
    assert sum(map(bool, images)) == 3
    assert {tag for tags in images for tag in tags} == {__version__}


def test_the_image_copies_the_files_that_its_commands_need():
    """Fails when a file that `make setup` reads is not in the image."""
    text = (FOLDER / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.M) for word in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    rule = re.search(r"^\$\(STAMP\): (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert rule is not None
    needed = {name.split("/")[0] for name in rule[1].split()}
    assert needed | {"Makefile", "april_rl", "configs", "recipes", "tools"} <= set(copied)


def test_the_ray_job_trains_on_every_gpu_with_the_ray_of_the_image():
    spec = loaded("kuberay.yaml")["spec"]
    command, train, *overrides = shlex.split(spec["entrypoint"])
    assert (command, train) == ("april-rl", "train")
    settings = [each for each in overrides if not each.startswith("hydra.")]
    config = compose_overrides(settings)
    gpus = [
        group.get("replicas", 1) * container["resources"]["limits"]["nvidia.com/gpu"]
        for group in kuberay_groups()
        for container in group["template"]["spec"]["containers"]
    ]
    assert config.runtime.num_workers == sum(gpus)
    cluster = spec["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "requirements" / "cuda.txt").read_text()


def test_every_mount_of_a_pod_has_its_volume():
    for group in kuberay_groups():
        pod = group["template"]["spec"]
        mounts = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_skypilot_task_is_a_script_whose_settings_exist():
    task = loaded("skypilot.yaml")
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
    found = re.findall(r"(?<!hydra\.)\b((?:runtime)\.\w+)=", task["run"])
    assert len(found) == 2
    compose_overrides([f"+recipe={task['envs']['RECIPE']}", *(f"{key}=null" for key in found[:1])])
    asked = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", task["run"])) - set(task["envs"])
    assert asked == {name for name in asked if name.startswith("SKYPILOT_")}
