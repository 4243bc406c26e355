"""tools/gpu_acceptance.py: every part is measured, skipped with its reason or failed with its
message, once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import gpu_acceptance
from acceptance_page import MISMATCH_FACTOR, Outcome, Results, calibrated
from acceptance_session import (
    FailedError,
    Machine,
    Measured,
    Row,
    Session,
    SkippedError,
    check_settings,
)

TOOL = ROOT / "tools" / "gpu_acceptance.py"
GPU = Machine(
    device="gpu",
    name="NVIDIA H200",
    count=1,
    total_gib=140.0,
    without_engine="",
    without_pytest="",
)
# Import finders see no vLLM, as where it was never installed.
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


def outcome(*mismatch: float, **changes: object) -> Outcome:
    given: dict[str, object] = {"status": "done", "took_s": 1.0, "values": {"mismatch": mismatch}}
    return Outcome(**(given | changes))  # type: ignore[arg-type]


def accept(folder: Path, *arguments: str, path: Path | None = None):
    """The ended program; `path` goes before all else that is imported."""
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


def test_the_limit_is_four_times_the_largest_mismatch_rounded_up_to_one_digit():
    parts = {"sync": outcome(0.0010, 0.0011), "smoke": outcome(0.0009), "environment": outcome()}
    assert MISMATCH_FACTOR == 4
    assert calibrated(parts) == 0.005  # of 0.0044
    assert calibrated({"sync": outcome(0.0125)}) == 0.05  # 0.05 is not rounded up to 0.06
    assert calibrated({"environment": outcome()}) is None


def test_the_limit_of_real_weights_is_what_to_set_and_that_of_random_ones_is_not(tmp_path):
    for weights, setting in (("random", "0.05`, the default"), ("Qwen/Qwen3-0.6B", "0.008`: 4 ×")):
        smoke = outcome(values={"mismatch": [0.002], "weights": weights})
        parts = {"sync": outcome(0.003), "smoke": smoke}  # the weights of sync are always random
        results = Results(folder=tmp_path, machine=GPU, outcomes=parts)
        results.write(gpu_acceptance.STEPS)
        assert f"- `learner.max_mismatch={setting}" in results.page_path.read_text()


def test_results_come_back_as_they_were_and_those_of_another_machine_are_refused(tmp_path):
    rows = (Row(quantity="tests", measured="9 passed", is_as_expected=True),)
    written = Results(folder=tmp_path, machine=GPU, outcomes={"sync": outcome(0.001, rows=rows)})
    written.write(gpu_acceptance.STEPS)
    [read] = Results.read(tmp_path, GPU).outcomes.values()
    assert (read.rows, read.values) == (rows, {"mismatch": [0.001]})
    other = Machine(
        device="cpu", name="CPU", count=1, total_gib=8.0, without_engine="", without_pytest=""
    )
    with pytest.raises(ValueError, match=r"results of 1 × NVIDIA H200.*give another output="):
        Results.read(tmp_path, other)


def test_the_page_says_what_to_look_at_and_what_to_set(tmp_path):
    rows = (
        Row(quantity="abort", measured="300 ms", expected="at most 100 ms", is_as_expected=False),
        Row(quantity="fastest", measured="α 2", setting="rollout.over_sampling_factor=2"),
    )
    outcomes = {"ticks": outcome(rows=rows), "alpha": outcome(status="skipped", reason="no | such")}
    results = Results(folder=tmp_path, machine=GPU, outcomes=outcomes)
    results.write(gpu_acceptance.STEPS)
    page = results.page_path.read_text()
    assert "| abort | at most 100 ms | 300 ms | **look** |" in page
    assert "done, **look** at 1 line |" in page
    assert "- `rollout.over_sampling_factor=2` (tick and abort times: fastest, α 2)" in page
    assert "skipped: no \\| such |" in page


def test_without_a_gpu_only_what_holds_anywhere_is_compared():
    slow = Row(quantity="tick", measured="9 s", expected="1 s", setting="a=1", is_as_expected=False)
    assert slow.without_gpu() == Row(quantity="tick", measured="9 s")
    wrong = replace(slow, holds_anywhere=True)
    assert wrong.without_gpu() == wrong


@pytest.mark.parametrize(
    ("ends_with", "status", "reason"),
    [
        (SkippedError("one device"), "skipped", "one device"),
        (FailedError("no room"), "failed", "no room"),
        (KeyError("bytes"), "failed", "KeyError: 'bytes'"),
    ],
)
def test_any_error_in_a_part_becomes_its_outcome(tmp_path, ends_with, status, reason):
    def measure(_: Session) -> Measured:
        raise ends_with

    step = gpu_acceptance._step("sync", "sync", 1, measure)
    found = gpu_acceptance._outcome(step, Session(folder=tmp_path, machine=GPU))
    assert (found.status, found.reason) == (status, reason)


def test_a_start_runs_what_is_missing_or_what_is_named(tmp_path, monkeypatch):
    ran = []

    def step(name: str) -> gpu_acceptance.Step:
        def measure(_: Session) -> Measured:
            ran.append(name)
            return Measured(rows=[])

        return gpu_acceptance._step(name, name, 1, measure)

    monkeypatch.setattr(gpu_acceptance, "STEPS", (step("sync"), step("smoke"), step("alpha")))
    session = Session(folder=tmp_path, machine=GPU)
    for named in (("smoke",), (), (), ("alpha",)):
        gpu_acceptance._run(session, Results.read(tmp_path, GPU), named)
        ran.append("end")
    assert ran == ["smoke", "end", "sync", "alpha", "end", "end", "alpha", "end"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [("parts=sync,nonsense", "nonsense is no part"), ("folder=x", "folder is not an option")],
)
def test_a_wrong_argument_is_named_before_anything_runs(argument, message, capsys):
    assert gpu_acceptance.main([argument]) == 2
    assert message in capsys.readouterr().err


def test_the_help_lists_every_part(capsys):
    assert gpu_acceptance.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in gpu_acceptance.NAMES)


def test_a_setting_that_the_configuration_refuses_skips_the_part_with_its_message():
    common = ["runtime.num_workers=1"]
    check_settings(common, ["rollout.resume=keep", "runtime.num_workers=2"])
    with pytest.raises(SkippedError, match=r"^engine.nonsense=1 is refused: .*engine\.nonsense"):
        check_settings(common, ["engine.nonsense=1"])
    with pytest.raises(SkippedError, match=r"engine.gpu_memory_utilization must be in \(0, 1\)"):
        check_settings(common, ["engine.gpu_memory_utilization=2"])


def test_a_command_that_hangs_fails_and_leaves_no_process(tmp_path):
    session = Session(folder=tmp_path, machine=GPU, timeout_s=0.5)
    started = time.perf_counter()
    with pytest.raises(FailedError, match=r"no end after .*hung.log"):
        session.run("hung", "sh", "-c", "echo $$; sleep 1000 & sleep 1000")
    assert time.perf_counter() - started < 15
    group = int((tmp_path / "logs" / "hung.log").read_text())
    time.sleep(0.2)  # a process that was killed takes a moment to end
    assert [p for p in psutil.process_iter(["status"]) if is_alive_in(p, group)] == []


def test_a_command_that_fails_is_shown_with_its_error_not_its_last_line(tmp_path):
    session = Session(folder=tmp_path, machine=GPU)
    with pytest.raises(FailedError, match=r"^error: no room \(exit status 1"):
        session.run("bad", "sh", "-c", "echo starting; echo error: no room; echo bye; exit 1")


def test_a_run_that_does_not_fit_into_memory_is_skipped_with_its_remedies(tmp_path):
    session = Session(folder=tmp_path, machine=GPU)
    said = "echo 'error: this run does not fit into memory'; echo '  - backward: too much'; exit 1"
    with pytest.raises(SkippedError, match=r"does not fit into memory - backward: too much \(exit"):
        session.run("big", "sh", "-c", said)


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_part_that_fails_is_on_the_page_and_a_second_start_does_nothing(tmp_path):
    (tmp_path / "path" / "vllm").mkdir(parents=True)
    broken = tmp_path / "path" / "vllm" / "__init__.py"
    broken.write_text(f"raise ImportError({PLANTED!r})")
    folder = tmp_path / "out"
    parts = "parts=environment,sync"
    first = accept(folder, parts, path=tmp_path / "path")
    assert first.returncode == 1, first.stdout + first.stderr
    expected = {"environment": "done", "sync": "failed"}
    assert statuses(folder) == expected
    page = (folder / "acceptance.md").read_text()
    assert f"failed: ImportError: {PLANTED}" in page
    assert "output=" in first.stdout.splitlines()[-1]  # how to run it again

    # A program that ran a part again would find vLLM whole now.
    written = (folder / "acceptance.json").stat().st_mtime_ns
    only = ",".join(set(gpu_acceptance.NAMES) - set(expected))
    everything = json.loads((folder / "acceptance.json").read_text())
    skipped = {"status": "skipped", "took_s": 0.0, "reason": "not in this test"}
    everything["parts"] |= {name: {**skipped, "rows": [], "values": {}} for name in only.split(",")}
    (folder / "acceptance.json").write_text(json.dumps(everything))
    written = (folder / "acceptance.json").stat().st_mtime_ns
    second = accept(folder)
    assert second.returncode == 1
    assert "run again by parts=NAME" in second.stdout
    assert "] " not in second.stdout
    assert (folder / "acceptance.json").stat().st_mtime_ns == written


@pytest.mark.soak
@pytest.mark.slow
def test_without_vllm_the_learner_is_measured_and_the_rest_says_why_not(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDES_VLLM)
    folder = tmp_path / "out"
    ended = accept(folder, "parts=sync,learner,offload,keep", path=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert statuses(folder) == {
        "sync": "skipped",
        "learner": "done",
        "offload": "done",
        "keep": "skipped",
    }
    assert (folder / "acceptance.md").read_text().count("vLLM is not installed: make setup") == 4


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize("parts", ["sync", "smoke,sync"])
def test_sync_and_the_smoke_recipe_are_measured_and_calibrate_the_mismatch(tmp_path, parts):
    ended = accept(tmp_path, f"parts={parts}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert statuses(tmp_path) == dict.fromkeys(parts.split(","), "done")
    assert len(found["parts"]["sync"]["values"]["mismatch"]) == 4
    assert 0 < found["max_mismatch"] <= 0.05
    page = (tmp_path / "acceptance.md").read_text()
    assert f"These parts would say {found['max_mismatch']:g} (" in page  # the weights were random
    if "smoke" in parts:
        assert found["parts"]["smoke"]["values"]["steps"] == 10
