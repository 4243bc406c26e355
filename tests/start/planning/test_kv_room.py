"""Samples in flight compared with the KV cache: when a run warns."""

from dataclasses import replace

from composed_config import load

from april_rl.start.planning.kv_room import KvDemand, kv_demand, kv_warning
from april_rl.training.runtime.layout import Layout

EIGHT = Layout(device="cuda", num_workers=8, tensor_parallel_size=1)


def demand(*overrides: str, layout: Layout = EIGHT) -> KvDemand:
    config = load("+recipe=qwen3_4b_dapo", *overrides)
    found = kv_demand(config, layout)
    assert found is not None
    return found


def test_a_slot_is_expected_to_hold_half_of_the_longest_response_and_its_part_of_the_prompt():
    """Fails when slots of all engines count, or a group's shared prompt counts for each sample."""
    found = demand("rollout.over_sampling_factor=2", "data.max_prompt_tokens=1600")
    assert found.num_slots == 2 * 32 * 8 // 8
    assert found.expected_tokens == 20480 / 2 + 1600 / 8
    assert demand("engine.prefix_caching=false").prompt_tokens == 2048
    pairs = replace(EIGHT, tensor_parallel_size=2)
    assert demand("rollout.over_sampling_factor=2", layout=pairs).num_slots == 128


def test_a_warning_about_samples_that_do_not_fit_has_the_numbers_and_keys():
    """With one token less than they need, and with exactly what they need."""
    former = demand("rollout.over_sampling_factor=2")
    assert list(kv_warning(former, former.total_tokens)) == []
    [warning] = kv_warning(former, former.total_tokens - 1)
    for part in (
        "64 samples",
        f"{former.total_tokens:,}",
        f"{former.total_tokens - 1:,}",
        "engine.gpu_memory_utilization",
        "rollout.over_sampling_factor",
        "rollout.max_response_tokens=20480",
    ):
        assert part in warning


def test_the_kv_cache_warning_of_a_cpu_engine_names_the_cpu_setting():
    on_cpu = Layout(device="cpu", num_workers=1, tensor_parallel_size=1)
    [warning] = kv_warning(kv_demand(load("+recipe=tiny_cpu"), on_cpu), 10)
    assert "engine.kv_cache_gib" in warning
    assert "gpu" not in warning
