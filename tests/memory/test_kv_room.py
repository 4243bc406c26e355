"""Samples in flight against the KV cache: what is planned, and when a run warns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from composed_config import load
from planned_models import GPU, INPUTS, changed, facts_of

from april_rl.assembly.collector import num_slots
from april_rl.config.choices import KvCacheDtype
from april_rl.memory.kv_room import (
    KvDemand,
    KvRoom,
    kv_demand,
    kv_warning,
    planned_kv_tokens,
)
from april_rl.memory.plan import GIB
from april_rl.runtime.layout import Layout

EIGHT = Layout(device="cuda", num_workers=8, tensor_parallel_size=1)


@pytest.fixture
def facts(tmp_path):
    """The facts of a model by its size."""
    return partial(facts_of, tmp_path)


def demand(*overrides: str, layout: Layout = EIGHT) -> KvDemand:
    config = load("+recipe=qwen3_4b_dapo", *overrides)
    found = kv_demand(config, layout, num_slots=num_slots(config))
    assert found is not None
    return found


def test_a_token_of_a_4b_model_takes_144_kib_and_its_weights_come_first(facts):
    """Fails when values are forgotten beside keys, or the weights are not taken off the share."""
    settings = changed(INPUTS, gpu_memory_utilization=0.85)
    planned = planned_kv_tokens(facts("4B"), settings, device_bytes=GPU)
    room = 0.85 * GPU - 2 * GIB - 2 * facts("4B").num_parameters
    assert planned == int(room / (144 * 1024))
    assert 420_000 < planned < 440_000


def test_two_gpus_of_one_engine_hold_the_weights_once_and_fp8_holds_twice(facts):
    one = planned_kv_tokens(facts("8B"), INPUTS, device_bytes=GPU)
    two = planned_kv_tokens(facts("8B"), changed(INPUTS, tensor_parallel_size=2), device_bytes=GPU)
    assert two > 2 * one
    halved = planned_kv_tokens(
        facts("8B"), changed(INPUTS, kv_cache_dtype=KvCacheDtype.fp8_e4m3), device_bytes=GPU
    )
    assert halved == pytest.approx(2 * one, abs=1)
    on_cpu = changed(INPUTS, device="cpu", kv_cache_gib=1.0)
    assert planned_kv_tokens(facts("8B"), on_cpu, device_bytes=0) == GIB // (144 * 1024)
    none = changed(INPUTS, gpu_memory_utilization=0.1)
    assert planned_kv_tokens(facts("8B"), none, device_bytes=GPU) == 0


def test_a_slot_is_expected_to_hold_half_of_the_longest_response_and_its_part_of_the_prompt():
    """Fails when slots are of all engines, or a group's shared prompt counts for each sample."""
    found = demand("rollout.over_sampling_factor=2", "data.max_prompt_tokens=1600")
    assert found.num_slots == 2 * 32 * 8 // 8
    assert found.expected_tokens == 20480 / 2 + 1600 / 8
    assert demand("engine.prefix_caching=false").prompt_tokens == 2048
    pairs = replace(EIGHT, tensor_parallel_size=2)
    assert demand("rollout.over_sampling_factor=2", layout=pairs).num_slots == 128


def test_the_flagship_at_its_former_settings_is_warned_with_the_numbers_and_the_keys(facts):
    """α 2 and the default share of the GPU, which the simulator says takes 87 GiB of 38."""
    former = demand("rollout.over_sampling_factor=2")
    planned = planned_kv_tokens(
        facts("4B"), changed(INPUTS, gpu_memory_utilization=0.6), device_bytes=GPU
    )
    warning = kv_warning(former, planned)
    assert warning is not None
    for part in (
        "64 samples",
        f"{former.total_tokens:,}",
        f"{planned:,}",
        "engine.gpu_memory_utilization",
        "rollout.over_sampling_factor",
        "rollout.max_response_tokens=20480",
    ):
        assert part in warning


def test_the_flagship_as_it_is_fits(facts):
    settings = changed(INPUTS, gpu_memory_utilization=0.85)
    assert kv_warning(demand(), planned_kv_tokens(facts("4B"), settings, device_bytes=GPU)) is None


def test_over_sampling_auto_is_not_warned_about_the_kv_cache():
    config = load("+recipe=qwen3_4b_dapo", "rollout.over_sampling_factor=auto")
    assert kv_demand(config, EIGHT, num_slots=num_slots(config)) is None
    said: list[str] = []
    KvRoom(None, tell=said.append).compare(1)
    assert said == []


def test_a_run_is_warned_once_by_the_plan_or_by_the_engines_as_built():
    needed = demand().total_tokens
    said: list[str] = []
    room = KvRoom(demand(), tell=said.append)
    room.compare(needed)
    assert said == []
    room.compare(needed - 1)
    room.compare(needed - 2)
    (warning,) = said
    assert f"{needed - 1:,}" in warning


def test_the_kv_cache_warning_of_a_cpu_engine_names_the_cpu_setting():
    on_cpu = Layout(device="cpu", num_workers=1, tensor_parallel_size=1)
    found = kv_demand(load("+recipe=tiny_cpu"), on_cpu, num_slots=24)
    assert found is not None
    warning = kv_warning(found, 10)
    assert warning is not None
    assert "engine.kv_cache_gib" in warning
    assert "gpu" not in warning
