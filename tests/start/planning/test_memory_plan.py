"""The memory plan: sizes compared with closed forms and real models, and errors when it does not
fit.
"""

import re

import pytest
from accelerate import init_empty_weights
from composed_config import load
from planned_models import GPU, INPUTS, LAYERS, MODELS, change, sizes_of, worker
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from april_rl.config.choices import Offload, Sleep
from april_rl.errors import PreflightError
from april_rl.start.planning.layout import settle
from april_rl.start.planning.memory_check import Room, check_memory, check_plan
from april_rl.start.planning.memory_inputs import Beside, memory_inputs
from april_rl.start.planning.memory_plan import GIB, Phase, plan_memory
from april_rl.training.learner.model.sizes import ModelSizes


def phase(model: ModelSizes, name: str, **changes: object) -> Phase:
    plan = plan_memory(model, change(INPUTS, **changes), device_bytes=GPU)
    return next(phase for phase in (*plan.phases, plan.host) if phase.name == name)


def refusal(model: ModelSizes, **changes: object) -> str:
    inputs = change(INPUTS, **changes)
    with pytest.raises(PreflightError) as caught:
        check_plan(model, inputs, Room(device=GPU, free=GPU - GIB))
    return str(caught.value)


def test_thirty_two_billion_parameters_on_eight_gpus_need_offload_to_generate():
    """Without offload, 12 of 16 bytes stay: 49 GB next to half a GPU. With offload=all they are
    gone.
    """
    message = refusal(sizes_of("32B"), tensor_parallel_size=2)
    has = r"- rollout: a GPU would need 8\d\.\d GiB and has 79\.0 GiB free, less a reserve of 2 %:"
    assert re.search(has, message)
    rollout = next(line for line in message.splitlines() if "- rollout" in line)
    assert "learner.offload=all lowers it to 41.0" in rollout
    away = phase(sizes_of("32B"), "rollout", offload=Offload.all, tensor_parallel_size=2)
    assert away.total == 40 * GIB + GIB  # NCCL
    host = phase(sizes_of("32B"), "host", offload=Offload.all)
    assert (
        host.items["master weights"] + host.items["optimizer state"]
        == 12 * sizes_of("32B").num_parameters / 8
    )


def test_offloaded_tensors_are_in_host_memory_and_return_for_their_phase():
    """The optimizer state is away in a backward pass, and in an optimizer step only one FSDP unit
    of it is there.
    """
    model = sizes_of("8B")
    moments = model.num_parameters
    assert phase(model, "host").items["optimizer state"] == 0
    away = {"offload": Offload.optimizer}
    assert phase(model, "host", **away).items["optimizer state"] == moments
    assert phase(model, "rollout", **away).items["optimizer state"] == 0
    assert phase(model, "rollout", **away).items["master weights"] == moments / 2
    assert phase(model, "backward", **away).items["optimizer state"] == 0
    unit = 8 * 151936 * 4096 + 8 * 4096  # the output layer and the last norm
    assert phase(model, "optimizer").items["optimizer state"] == moments
    assert phase(model, "optimizer", **away).items["optimizer state"] == unit / 8
    adapted = sizes_of("8B", rank=16)
    in_layers = 8 * adapted.num_trained / adapted.num_layers
    assert phase(adapted, "optimizer", **away).items["optimizer state"] == in_layers / 8


def test_the_engines_share_is_relative_to_the_whole_gpu_and_includes_its_weights():
    items = phase(sizes_of("8B"), "rollout", tensor_parallel_size=2).items
    assert items["engine weights"] == sizes_of("8B").num_parameters
    assert items["engine weights"] + items["KV cache and workspace"] == GPU / 2
    message = refusal(sizes_of("32B"), gpu_memory_utilization=0.5, offload=Offload.all)
    assert "engine.gpu_memory_utilization=0.5 gives the engine 40.0 GiB" in message
    assert "engine.tensor_parallel_size" in message


def test_memory_that_torch_does_not_allocate_is_in_the_plan():
    """CUDA graphs and NCCL buffers of a sleeping engine; the learner's NCCL buffers in
    each phase.
    """
    kept = "kept by a sleeping engine"
    assert phase(sizes_of("8B"), "backward").items[kept] == 1.5e9
    assert phase(sizes_of("8B"), "backward", tensor_parallel_size=2).items[kept] == 1.5e9 + GIB
    assert phase(sizes_of("8B"), "optimizer", cuda_graphs=False).items[kept] == 0
    freed = {"sleep_mode_offload_cudagraph": True, "enable_nccl_comm_suspend": True}
    found = phase(sizes_of("8B"), "backward", tensor_parallel_size=2, args=freed)
    assert found.items[kept] == 0
    assert kept not in phase(sizes_of("8B"), "backward", sleep=Sleep.never).items
    assert kept not in phase(sizes_of("8B"), "rollout").items, "it is part of the share"
    for name in ("rollout", "backward", "optimizer", "weight sync"):
        assert phase(sizes_of("8B"), name).items["NCCL of the learner"] == GIB
        assert phase(sizes_of("8B"), name, num_workers=1).items["NCCL of the learner"] == 0


def test_two_percent_of_a_gpu_stays_in_reserve():
    """Fails when a plan may fill a GPU to the last byte, or keeps a reserve on a CPU."""
    model = sizes_of("8B")
    need = max(each.total for each in plan_memory(model, INPUTS, device_bytes=GPU).phases)
    assert check_plan(model, INPUTS, Room(device=GPU, free=need + 0.021 * GPU))
    with pytest.raises(PreflightError, match=r"less a reserve of 2 %"):
        check_plan(model, INPUTS, Room(device=GPU, free=need + 0.019 * GPU))


def test_copies_of_the_weights_on_fewer_workers_are_larger():
    """Hybrid sharding. Fails when sizes are divided by the number of workers instead of the shard
    size.
    """
    whole, half = (phase(sizes_of("8B"), "optimizer", shard_size=n) for n in (8, 4))
    for name in ("master weights", "gradients", "optimizer state"):
        assert half.items[name] == 2 * whole.items[name]
    message = refusal(sizes_of("32B"), shard_size=4, num_workers=8)
    assert "learner.shard_size=null lowers it to" in message


def test_adapters_are_trained_and_the_model_is_stored_in_the_compute_precision():
    model, adapted = sizes_of("8B"), sizes_of("8B", rank=16)
    items = phase(adapted, "optimizer", has_reference=True).items
    with init_empty_weights():
        built = AutoModelForCausalLM.from_config(Qwen3Config(**MODELS["8B"], **LAYERS))
    linear = [m for m in built.model.modules() if isinstance(m, nn.Linear)]
    adapters = 16 * sum(m.in_features + m.out_features for m in linear)
    assert items["gradients"] == 4 * adapters / 8
    assert items["master weights"] == (4 * adapters + 2 * model.num_parameters) / 8
    assert phase(adapted, "host", has_reference=True).items["reference"] == 0
    assert phase(model, "host", has_reference=True).items["reference"] == model.num_parameters / 4
    still = phase(model, "host", has_reference=True).items
    moving = phase(model, "host", has_reference=True, moves_reference=True).items
    assert moving["checkpoint"] == still["checkpoint"] + still["reference"]


@pytest.mark.parametrize(
    ("changes", "phase_name", "key"),
    [
        ({"gpu_memory_utilization": 0.9}, "rollout", "engine.gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0.9}, "rollout", "learner.offload=all"),
        ({"activation_checkpointing": False}, "backward", "learner.activation_checkpointing=true"),
        ({"activation_checkpointing": False}, "backward", "learner.max_tokens=10000"),
        ({"num_workers": 1}, "optimizer", "runtime.num_workers=2"),
        ({"num_workers": 2, "shard_size": 1}, "optimizer", "learner.shard_size=null"),
    ],
)
def test_a_full_phase_names_the_settings_that_make_it_smaller(changes, phase_name, key):
    lines = refusal(sizes_of("8B"), **changes).splitlines()
    [line] = [line for line in lines if f"- {phase_name}:" in line]
    assert f"{key}" in line
    assert "master weights" in line


def test_the_proposed_share_of_the_engine_is_low_enough():
    """Fails when it is rounded up, or the learner's part is forgotten."""
    message = refusal(sizes_of("8B"), gpu_memory_utilization=0.95)
    share = float(re.findall(r"engine\.gpu_memory_utilization=([\d.]+) lowers", message)[0])
    room = Room(device=GPU, free=GPU - GIB)
    assert check_plan(sizes_of("8B"), change(INPUTS, gpu_memory_utilization=share), room)
    assert "rollout" in refusal(sizes_of("8B"), gpu_memory_utilization=share + 0.02)


def test_no_share_is_proposed_that_is_too_small_for_the_engines_weights():
    """Master weights and optimizer state already exceed the GPU. Fails when 0 is proposed, which is
    refused.
    """
    message = refusal(sizes_of("8B"), num_workers=1)
    rollout = next(line for line in message.splitlines() if "- rollout" in line)
    assert "learner.offload=all lowers it to" in rollout
    assert "gpu_memory_utilization" not in rollout


def test_on_cpu_the_host_holds_learner_and_engine_at_once():
    """Everything is in one phase: 16 bytes per parameter, the engine's copy, its cache."""
    model = sizes_of("8B")
    settings = change(INPUTS, device="cpu", num_workers=1, kv_cache_gib=100.0)
    [whole] = plan_memory(model, settings).phases
    names = ("master weights", "gradients", "optimizer state", "engine weights")
    assert sum(whole.items[name] for name in names) == 18 * model.num_parameters
    assert whole.items["KV cache"] == 100 * GIB
    assert 2 * model.num_parameters < whole.items["gathered layers"] < 6 * model.num_parameters
    nodes = [worker("a", host=whole.total - 20 * GIB)]
    with pytest.raises(PreflightError, match=r"a worker .* engine\.kv_cache_gib=80 lowers"):
        check_memory(model, settings, nodes)
    assert check_memory(model, settings, [worker("a", host=whole.total + 1)])


def test_on_cpu_nothing_is_offloaded_with_any_setting():
    """The learner keeps its optimizer state there, and so does the plan. Fails when either moves
    it.
    """
    for recipe, gpus, moved in (("tiny_cpu", 0, Offload.none), ("tiny_gpu", 1, Offload.all)):
        config = load(f"+recipe={recipe}", "learner.offload=all")
        config, layout = settle(config, gpus=gpus, where="this machine")
        assert (
            config.learner.offload
            is memory_inputs(config, layout, Beside()).learner.offload
            is moved
        )


def test_the_settings_of_the_paper_fit_and_are_shown_as_a_table():
    """The recipe on eight GPUs of 80 GiB; every phase adds up to its last line."""
    chosen = load("+recipe=qwen3_4b_dapo", "engine.gpu_memory_utilization=0.85")
    settings = memory_inputs(*settle(chosen, gpus=8, where="here"), Beside())
    workers = [worker("a", host=1000 * GIB)] * 8
    table = str(check_memory(sizes_of("4B"), settings, workers)).splitlines()
    assert table[0].split("GiB")[1].split() == [
        *("rollout", "backward", "optimizer", "weight", "sync", "host")
    ]
    assert len({len(line) for line in table}) == 1
    columns = [re.findall(r"  +(\d+\.\d|-)(?=  |$)", line) for line in table[1:]]
    for column in zip(*columns, strict=True):
        *items, total = (0.0 if cell == "-" else float(cell) for cell in column)
        assert sum(items) == pytest.approx(total, abs=0.05 * len(items))
