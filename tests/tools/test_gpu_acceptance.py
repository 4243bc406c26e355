"""tools/gpu_acceptance.py: every part is measured, skipped with a reason or failed with a message,
and only once.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu_acceptance
import psutil
import pytest
from acceptance import runs
from acceptance.device import sheet_tflops
from acceptance.page import Outcome, Results, calibrate
from acceptance.session import FailedError, Machine, Measured, Part, Row, Session, SkippedError
from acceptance.tensor_parallel import kill_rank, row_of_kill, rows_of_run, tensor_parallel
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
SYNC = {"gather_s": 0.2, "load_s": 0.1, "bytes": 1.2e9}
MEASURED = {
    "engine": {
        **{"device": "NVIDIA H200", "decode_bytes_per_s": 3.4e12, "between_steps_s": 1e-3},
        **{"prefill_flops_per_s": 4e14, "asleep_gib": 1.2, "sync": SYNC},
    },
    "learner": {"tflops": 165.0},
}
PLANTED = "libcudart.so.13: cannot open shared object file"


def outcome(**changes: object) -> Outcome:
    return Outcome(**({"status": "done", "took_s": 1.0} | changes))  # type: ignore[arg-type]


def smoke(weights: str, *mismatch: float) -> dict[str, Outcome]:
    return {"smoke": outcome(values={"weights": weights, "mismatch": mismatch})}


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


def test_the_limit_is_four_times_the_largest_mismatch_rounded_up_to_one_digit():
    assert calibrate(smoke("Qwen/Qwen3-0.6B", 0.0010, 0.0011)) == 0.005  # of 0.0044
    assert calibrate(smoke("Qwen/Qwen3-0.6B", 0.0125)) == 0.05  # it is not rounded up to 0.06
    assert calibrate(smoke("random", 0.0125)) is None
    assert calibrate({"environment": outcome()}) is None


def test_a_calibration_is_written_after_learner_and_engine_are_measured(tmp_path):
    """Fails when a key or a unit is not the one that predictions read."""
    parts = {name: outcome(values=values) for name, values in MEASURED.items()}
    path = tmp_path / "calibration.json"
    for name in MEASURED:
        assert not path.exists()
        outcomes = {each: parts[each] for each in MEASURED if each <= name}
        Results(folder=tmp_path, machine=GPU, outcomes=outcomes).write(gpu_acceptance.PARTS)
    found = Calibration.read(path)
    assert (found.device, found.update_flops_per_s) == ("NVIDIA H200", 165e12)
    assert found.sync_bytes_per_s == pytest.approx(1.2e9 / 0.3)
    assert found.rates.bytes_per_s == 3.4e12
    assert f"calibration={path}" in (tmp_path / "acceptance.md").read_text()


def steps_with(*mismatch: float) -> list[dict[str, float]]:
    return [{"time/step_s": 2.0, "mismatch/logprob_abs_mean": each} for each in mismatch]


@pytest.mark.parametrize(
    ("mismatch", "as_expected"),
    [
        ((0.002, 0.004, 0.003, 0.004, 0.003), [True, True]),
        ((0.002, 0.4, 0.6, 0.8, 1.0), [True, False]),  # the engine keeps its first weights
        ((0.002, 0.003), [False, True]),
    ],
)
def test_engines_on_several_gpus_need_every_step_and_a_small_mismatch(mismatch, as_expected):
    rows = rows_of_run(2, steps_with(*mismatch))
    assert [row.is_as_expected for row in rows] == as_expected


@pytest.mark.parametrize(
    ("changes", "is_as_expected"),
    [
        ({}, True),
        ({"status": 1}, False),
        ({"steps": [1, 2, 2, 3, 4, 5]}, False),
        ({"has_restarted": False}, False),
        ({"num_workers": 0}, False),  # nothing was killed
    ],
)
def test_a_killed_rank_needs_a_restart_and_every_step_once(changes, is_as_expected):
    found = {"num_workers": 4, "status": 0, "has_restarted": True, "steps": [1, 2, 3, 4, 5]}
    assert row_of_kill(found | changes).is_as_expected is is_as_expected


def test_engines_on_several_gpus_are_skipped_with_fewer(tmp_path):
    with pytest.raises(SkippedError, match="it needs 4 GPUs; this machine has 1"):
        tensor_parallel(Session(tmp_path, GPU))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_run_of_two_ranks_continues_after_one_is_killed(tmp_path):
    two = ["runtime.num_workers=2", "engine.tensor_parallel_size=2", "engine.kv_cache_gib=0.25"]
    found = kill_rank(str(tmp_path / "killed"), [*two, "runtime.threads=1"])
    assert row_of_kill(found).is_as_expected, found
    assert found["num_workers"] == 2


def test_results_are_read_back_unchanged_and_refused_on_another_machine(tmp_path):
    rows = (Row("tests", "9 passed", is_as_expected=True),)
    written = Results(folder=tmp_path, machine=GPU, outcomes={"sync": outcome(rows=rows)})
    written.write(gpu_acceptance.PARTS)
    assert Results.read(tmp_path, GPU).outcomes["sync"].rows == rows
    with pytest.raises(ValueError, match=r"results of 1 × NVIDIA H200.*give another output="):
        Results.read(tmp_path, replace(GPU, count=2))


def test_the_page_says_what_to_check_and_what_to_set(tmp_path):
    rows = (
        Row("abort", "300 ms", "at most 100 ms", is_as_expected=False),
        Row("fastest", "α 2", setting="rollout.over_sampling_factor=2"),
    )
    outcomes = {
        "smoke": outcome(rows=rows, values={"weights": "Qwen/Qwen3-0.6B", "mismatch": [0.002]}),
        "keep": outcome(status="skipped", reason="no | such"),
        "learner": outcome(status="failed", reason=f"ImportError: {PLANTED}"),
    }
    results = Results(folder=tmp_path, machine=GPU, outcomes=outcomes)
    results.write(gpu_acceptance.PARTS)
    page = results.page_path.read_text()
    assert "| abort | at most 100 ms | 300 ms | **look** |" in page
    assert "done, **look** at 1 of its lines |" in page
    assert (
        "- `rollout.over_sampling_factor=2` (ten steps of qwen3_0_6b_smoke: fastest, α 2)" in page
    )
    assert "- `learner.max_mismatch=0.008` (4 ×" in page
    assert "skipped: no \\| such |" in page
    assert f"failed: ImportError: {PLANTED}" in page


@pytest.mark.parametrize(
    ("ends_with", "status", "reason"),
    [
        (SkippedError("one device"), "skipped", "one device"),
        (FailedError("no room"), "failed", "no room"),
        (KeyError("bytes"), "failed", "KeyError: 'bytes'"),
        (ImportError(PLANTED), "failed", f"ImportError: {PLANTED}"),
    ],
)
def test_any_error_in_a_part_becomes_its_outcome(tmp_path, ends_with, status, reason):
    def measure(_: Session) -> Measured:
        raise ends_with

    part = Part("sync", "sync", 1, measure)
    found = gpu_acceptance.outcome_of(part, Session(tmp_path, GPU))
    assert (found.status, found.reason) == (status, reason)


def test_a_start_runs_the_missing_or_the_named_parts(tmp_path, monkeypatch):
    ran = []

    def part(name: str) -> Part:
        def measure(_: Session) -> Measured:
            ran.append(name)
            return Measured(rows=[], values={"weights": "random"})

        return Part(name, name, 1, measure)

    monkeypatch.setattr(gpu_acceptance, "PARTS", tuple(map(part, ("sync", "smoke", "alpha"))))
    monkeypatch.setattr(gpu_acceptance, "NAMES", ("sync", "smoke", "alpha"))
    for named in (("smoke",), (), (), ("alpha",)):
        gpu_acceptance.run(Results.read(tmp_path, GPU), named)
        ran.append("end")
    assert ran == ["smoke", "end", "sync", "alpha", "end", "end", "alpha", "end"]


@pytest.mark.parametrize("modes", [runs.ALPHAS, runs.GRAPHS, runs.ASYNCHRONOUS, runs.KEEP])
def test_the_settings_that_a_comparison_proposes_work_together(modes):
    for settings in modes.values():
        to_config(compose_overrides(["model.path=MODEL", "data.path=DATA", *settings]))


def test_peaks_are_found_by_the_names_that_devices_have():
    """A longer name is matched before a shorter one that it contains, such as H100 PCIe before
    H100.
    """
    assert sheet_tflops("NVIDIA H100 PCIe") == 756.5
    assert sheet_tflops("NVIDIA H100 80GB HBM3") == 989.5
    assert sheet_tflops("NVIDIA T4") is None


def test_a_wrong_argument_is_reported_before_anything_runs_and_the_help_lists_every_part(capsys):
    for argument, message in (
        ("parts=sync,nonsense", "nonsense is not a part"),
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


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("echo error: no room; echo bye", FailedError, r"^error: no room \(exit status 1"),
        (
            "echo 'error: this run does not fit into memory'; echo '  - backward: too much'",
            SkippedError,
            r"does not fit into memory - backward: too much \(exit",
        ),
    ],
)
def test_a_command_that_fails_is_shown_with_its_error(tmp_path, said, error, message):
    """Fails when only its last line is shown, or when a run that is too large counts as failed."""
    with pytest.raises(error, match=message):
        Session(tmp_path, GPU).run("bad", "sh", "-c", f"echo starting; {said}; exit 1")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize(("part", "library"), [("learner", "hydra"), ("sync", "vllm")])
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
    ended = accept(folder, "parts=sync,learner,keep", path=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert statuses(folder) == {"sync": "skipped", "learner": "done", "keep": "skipped"}
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
@pytest.mark.parametrize("parts", ["sync", "smoke,sync"])
def test_sync_and_the_smoke_recipe_are_measured(tmp_path, parts):
    ended = accept(tmp_path, f"parts={parts}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert statuses(tmp_path) == dict.fromkeys(parts.split(","), "done")
    assert len(found["parts"]["sync"]["values"]["mismatch"]) == 4
    assert found["max_mismatch"] is None  # the weights were random
    if "smoke" in parts:
        assert found["parts"]["smoke"]["values"]["steps"] == 10
