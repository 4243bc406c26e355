"""A recipe at its real size: the KV cache that fits on its GPUs, and the gain of α."""

import pytest
from composed_config import load
from planned_models import GPU, HUB, INPUTS, PLANNED, change, sizes_of
from shapes import shape_by_name

from april_rl.config.choices import KvCacheDtype
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.price.memory import real_layout, real_memory
from april_rl.lab.price.prediction import scenario_at_real_size, work_of
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.start.planning.engine_sleep import decide_sleep_and_resume
from april_rl.start.planning.facts import Models
from april_rl.start.planning.kv_room import kv_demand, planned_kv_tokens
from april_rl.start.planning.memory_check import Room
from april_rl.start.planning.memory_inputs import Beside, memory_inputs
from april_rl.start.planning.memory_plan import GIB

SMALL_GPUS = {"qwen3_0_6b_smoke": 24, "qwen3_0_6b_gsm8k": 24, "qwen3_4b_lora": 24}
SMALL_GPUS |= {"qwen3_1_7b_gsm8k": 24, "qwen3_8b_lora": 48, "r1_distill_1_5b_python": 24}


def test_a_token_of_a_4b_model_takes_144_kib_and_its_weights_come_first():
    """Fails when only keys count and not values, or the weights are not subtracted from
    the share.
    """
    settings = change(INPUTS, gpu_memory_utilization=0.85)
    planned = planned_kv_tokens(sizes_of("4B"), settings, device_bytes=GPU)
    room = 0.85 * GPU - 2 * sizes_of("4B").num_parameters
    assert planned == int(room / (144 * 1024))
    assert 434_000 < planned < 454_000


def test_an_engine_on_two_gpus_holds_the_weights_once_and_fp8_doubles_the_cache():
    one = planned_kv_tokens(sizes_of("8B"), INPUTS, device_bytes=GPU)
    two = planned_kv_tokens(
        sizes_of("8B"), change(INPUTS, tensor_parallel_size=2), device_bytes=GPU
    )
    assert two > 2 * one
    halved = planned_kv_tokens(
        sizes_of("8B"), change(INPUTS, kv_cache_dtype=KvCacheDtype.fp8_e4m3), device_bytes=GPU
    )
    assert halved == pytest.approx(2 * one, abs=1)
    on_cpu = change(INPUTS, device="cpu", kv_cache_gib=1.0)
    assert planned_kv_tokens(sizes_of("8B"), on_cpu, device_bytes=0) == GIB // (144 * 1024)
    none = change(INPUTS, gpu_memory_utilization=0.1)
    assert planned_kv_tokens(sizes_of("8B"), none, device_bytes=GPU) == 0


@pytest.mark.parametrize("name", PLANNED)
def test_samples_in_flight_fit_the_kv_cache_or_nearly_in_the_papers_setup(name):
    config, layout = real_layout(load(f"+recipe={name}"))
    model = sizes_of(HUB[config.model.path], rank=config.lora.rank)
    gpu = SMALL_GPUS.get(name, 80) * GIB
    room = Room(device=gpu, free=0.98 * gpu)
    inputs = memory_inputs(config, layout, Beside())
    inputs = decide_sleep_and_resume(config, inputs, model=model, room=room).inputs
    planned = planned_kv_tokens(model, inputs, device_bytes=gpu)
    demand = kv_demand(config, layout)
    assert demand is not None
    assert planned >= (0.8 if name.startswith("paper/") else 1.0) * demand.total_tokens


def test_the_plan_reports_the_gpu_share_that_auto_chose():
    config, models = load("+recipe=qwen3_4b_dapo"), Models(policy=sizes_of("4B"), beside=Beside())
    small, large = (real_memory(config, models, gpu_gib=gib).reasons[0] for gib in (80, 141))
    assert "engine.gpu_memory_utilization=auto: 0.85, for engines that sleep" in small
    assert "engine.gpu_memory_utilization=auto: 0.59, what the learner's update" in large


@pytest.mark.parametrize("has_critic", [False, True])
def test_gains_are_predicted_for_engines_that_sleep_as_planned_beside_a_critic(has_critic):
    """Fails when only the memory plan counts the critic, for which engines have to sleep."""
    config, model = load("+recipe=qwen3_4b_dapo"), sizes_of("4B")
    critic = model if has_critic else None
    memory = real_memory(config, Models(policy=model, beside=Beside(critic=critic)), gpu_gib=106)
    work = work_of(config, Assumptions(), shape=shape_by_name("4B"), critic=critic)
    scenario = scenario_at_real_size(memory, work, GPU_KINDS["h100"].rates())
    assert scenario.keeps_parked is not has_critic
    said = "engines sleep during updates" if has_critic else "engines stay awake"
    assert any(f"engine.sleep=auto: {said}" in reason for reason in memory.reasons)


def test_the_plan_shows_the_memory_of_engines_that_cannot_keep_their_caches():
    chosen = ("rollout.resume=keep", "engine.gpu_memory_utilization=0.8")
    models = Models(policy=sizes_of("4B"), beside=Beside())
    found = real_memory(load("+recipe=qwen3_4b_dapo", *chosen), models, gpu_gib=80)
    assert found.too_large.startswith("rollout.resume=keep needs engines that stay awake")
    assert found.table.startswith("memory of a worker, GiB")
