"""tools/gpu_acceptance.py: every part is measured, skipped with a reason or failed with a message,
and only once.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_acceptance
import psutil
import pytest
from acceptance import runs
from acceptance.session import FailedError, Machine, Session
from acceptance.tensor_parallel import kill_rank, row_of_kill
from own_process import wait_until
from source_tree import ROOT

from april_rl.config.store import compose_overrides, to_config
from april_rl.lab.simulator.calibration import Calibration

TOOL = ROOT / "tools" / "gpu_acceptance.py"
GPU = Machine(
    device="gpu", name="NVIDIA H200", count=1, total_gib=140.0, without_engine="", without_pytest=""
)
# Import finders find no vLLM, as if it were not installed.
HIDES_VLLM = """
import sys
from importlib.machinery import PathFinder

class WithoutVllm(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [WithoutVllm if finder is PathFinder else finder for finder in sys.meta_path]
"""
PLANTED = "libcudart.so.13: cannot open shared object file"


def accept(folder: Path, *arguments: str, path: Path | None = None):
    """Run the tool and return the ended program; `path` is searched first for imports."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, str(TOOL), f"output={folder}", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=900, check=False
    )


def is_alive_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def statuses(folder: Path) -> dict[str, str]:
    parts = json.loads((folder / "acceptance.json").read_text())["parts"]
    return {name: part["status"] for name, part in parts.items()}


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_run_of_two_ranks_continues_after_one_is_killed(tmp_path):
    two = ["runtime.num_workers=2", "engine.tensor_parallel_size=2", "engine.kv_cache_gib=0.25"]
    found = kill_rank(str(tmp_path / "killed"), [*two, "runtime.threads=1"])
    assert row_of_kill(found).is_as_expected, found
    assert found["num_workers"] == 2


@pytest.mark.parametrize("modes", [runs.ALPHAS, runs.GRAPHS, runs.ASYNCHRONOUS, runs.KEEP])
def test_the_settings_that_a_comparison_proposes_work_together(modes):
    for settings in modes.values():
        to_config(compose_overrides(["model.path=MODEL", "data.path=DATA", *settings]))


def test_a_wrong_argument_is_reported_before_anything_runs_and_the_help_lists_every_part(capsys):
    for argument, message in (
        ("parts=certify,nonsense", "nonsense is not a part"),
        ("folder=x", "folder is not an option"),
    ):
        assert gpu_acceptance.main([argument]) == 2
        assert message in capsys.readouterr().err
    assert gpu_acceptance.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in gpu_acceptance.NAMES)


def test_a_command_that_hangs_fails_and_leaves_no_process(tmp_path):
    session = Session(tmp_path, GPU, timeout_s=0.5)
    started = time.perf_counter()
    with pytest.raises(FailedError, match=r"no end after .*hung.log"):
        session.run("hung", "sh", "-c", "echo $$; sleep 1000 & sleep 1000")
    assert time.perf_counter() - started < 60
    group = int((tmp_path / "logs" / "hung.log").read_text())
    wait_until(lambda: not any(is_alive_in(each, group) for each in psutil.process_iter()))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize(("part", "library"), [("learner", "hydra"), ("engine", "vllm")])
def test_a_part_that_fails_is_on_the_page_and_a_second_start_repeats_nothing(
    tmp_path, capsys, part, library
):
    """Fails when the page lacks the message of a library that a part cannot import."""
    (tmp_path / "path" / library).mkdir(parents=True)
    broken = tmp_path / "path" / library / "__init__.py"
    broken.write_text(f"raise ImportError({PLANTED!r})")
    folder = tmp_path / "out"
    first = accept(folder, f"parts={part}", path=tmp_path / "path")
    assert first.returncode == 1, first.stdout + first.stderr
    expected = {part: "failed"}
    assert statuses(folder) == expected
    page = (folder / "acceptance.md").read_text()
    assert f"failed: ImportError: {PLANTED}" in page
    assert "output=" in first.stdout.splitlines()[-1]  # the page shows how to run the part again

    # A second run of the part would be able to import the library.
    only = ",".join(set(gpu_acceptance.NAMES) - set(expected))
    everything = json.loads((folder / "acceptance.json").read_text())
    skipped = {"status": "skipped", "took_s": 0.0, "reason": "not in this test"}
    everything["parts"] |= {name: {**skipped, "rows": [], "values": {}} for name in only.split(",")}
    (folder / "acceptance.json").write_text(json.dumps(everything))
    written = (folder / "acceptance.json").stat().st_mtime_ns
    assert gpu_acceptance.main([f"output={folder}"]) == 1
    printed = capsys.readouterr().out
    assert "run again by parts=NAME" in printed
    assert "] " not in printed
    assert (folder / "acceptance.json").stat().st_mtime_ns == written


@pytest.mark.soak
@pytest.mark.slow
def test_without_vllm_the_learner_is_measured_and_the_other_parts_give_the_reason(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDES_VLLM)
    folder = tmp_path / "out"
    ended = accept(folder, "parts=certify,learner,keep", path=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert statuses(folder) == {"certify": "skipped", "learner": "done", "keep": "skipped"}
    assert (folder / "acceptance.md").read_text().count("vLLM is not installed: make setup") == 4


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_engine_is_measured_and_a_calibration_is_written(tmp_path):
    ended = accept(tmp_path, "parts=learner,engine")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert Calibration.read(tmp_path / "calibration.json").update_flops_per_s > 0
    assert "gather" in (tmp_path / "acceptance.md").read_text()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_numerics_are_certified_and_the_smoke_recipe_is_measured(tmp_path):
    ended = accept(tmp_path, "parts=smoke,certify")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert statuses(tmp_path) == dict.fromkeys(("smoke", "certify"), "done")
    assert found["parts"]["certify"]["values"] == {"compared": 24, "failed": 0}
    assert found["max_mismatch"] is None  # the weights were random
    assert found["parts"]["smoke"]["values"]["steps"] == 10
