"""engine.sleep: when engines on GPUs stay awake, and what the run reports about it."""

import pytest
from composed_config import load, refusal
from planned_models import GPU, INPUTS, change, sizes_of

from april_rl.config.choices import Sleep
from april_rl.config.engine import EngineConfig
from april_rl.errors import LayoutError, PreflightError
from april_rl.start.planning.engine_sleep import settle_sleep
from april_rl.start.planning.layout import settle
from april_rl.start.planning.memory_check import Room, check_plan
from april_rl.start.planning.memory_inputs import Decision, MemoryInputs
from april_rl.start.planning.memory_plan import GIB, plan_memory
from april_rl.training.engine.device import AcceleratorDevice
from april_rl.training.learner.model.sizes import ModelSizes

H200 = 141 * GIB
ONE_GPU = change(INPUTS, num_workers=1)


def room(device: float) -> Room:
    return Room(device=device, free=device - GIB)


def test_an_awake_engine_has_its_whole_share_in_every_phase():
    """Fails when a phase only counts what a sleeping engine keeps, or counts the engine's weights
    twice.
    """
    awake = change(INPUTS, sleep=Sleep.never)
    names = ("engine weights", "KV cache and workspace")
    for phase in plan_memory(sizes_of("8B"), awake, device_bytes=GPU).phases:
        assert sum(phase.items[name] for name in names) == GPU / 2, phase.name
    asleep = plan_memory(sizes_of("8B"), INPUTS, device_bytes=GPU).phases[1:]
    for phase in asleep:
        assert names[1] not in phase.items
        assert names[0] not in phase.items or phase.name == "weight sync"


@pytest.mark.parametrize(
    ("model", "inputs", "device", "stays_awake"),
    [
        ("0.6B", ONE_GPU, 24 * GIB, False),
        ("0.6B", ONE_GPU, GPU, True),
        ("1.7B", ONE_GPU, GPU, False),
        ("1.7B", ONE_GPU, H200, True),
        ("1.7B", INPUTS, GPU, True),
        ("4B", ONE_GPU, H200, False),
        ("4B", INPUTS, GPU, True),
        ("8B", change(INPUTS, gpu_memory_utilization=0.6), GPU, False),
        ("8B", INPUTS, H200, True),
    ],
)
def test_the_plan_decides_and_the_run_gives_the_reason(model, inputs, device, stays_awake):
    """The engine has half of the GPU; it stays awake if a tenth of the GPU is left over."""
    inputs, reason = settle_sleep(sizes_of(model), inputs, room=room(device))
    assert inputs.engine_sleeps is not stays_awake
    said = "engines stay awake" if stays_awake else "engines sleep during updates; if they stayed"
    assert reason.startswith(f"engine.sleep=auto: {said}")
    plan = plan_memory(sizes_of(model), change(inputs, sleep=Sleep.never), device_bytes=device)
    peak = max(phase.total for phase in plan.phases[1:])
    assert f"{peak / GIB:.1f} " in reason
    assert (peak <= room(device).free - device / 10) is stays_awake


def sleep_of(model: ModelSizes, inputs: MemoryInputs, *, device: float) -> Decision:
    return settle_sleep(model, inputs, room=room(device))


@pytest.mark.parametrize("chosen", [Sleep.never, Sleep.always])
def test_an_explicit_engine_sleep_is_used_without_a_message(chosen):
    """Fails when the plan overrides never or always."""
    asked = change(INPUTS, sleep=chosen)
    for device in (GPU, H200):
        assert sleep_of(sizes_of("8B"), asked, device=device) == (asked, "")


def test_engine_sleep_never_is_checked_against_the_whole_gpu_with_remedies():
    awake = change(INPUTS, sleep=Sleep.never)
    assert check_plan(sizes_of("8B"), awake, room(GPU))
    with pytest.raises(PreflightError, match="backward: a GPU would need") as caught:
        check_plan(sizes_of("8B"), change(awake, gpu_memory_utilization=0.7), room(GPU))
    message = str(caught.value)
    assert "engine.sleep=always lowers it to" in message
    assert "engine.gpu_memory_utilization=0.62" in message


def test_keep_without_room_is_refused_with_the_missing_gib_and_remedies():
    """Each remedy is enough by itself. Fails when the proposed share is too large, or sleep is
    proposed, which keeps nothing.
    """
    keeps = change(INPUTS, keeps_parked=True, gpu_memory_utilization=0.6)
    with pytest.raises(PreflightError, match=r"rollout\.resume=keep needs engines that stay") as e:
        sleep_of(sizes_of("8B"), keeps, device=GPU)
    message = str(e.value)
    plan = plan_memory(sizes_of("8B"), change(keeps, sleep=Sleep.never), device_bytes=GPU)
    missing = plan.phases[1].total - (GPU - GIB - 8 * GIB)
    assert f"{missing / GIB:.1f} more than the 79.0 that are free minus a margin of 8.0" in message
    assert "engine.sleep=always" not in message
    assert "engine.sleep=never uses the margin too" in message
    assert message.endswith("rollout.resume=reprefill lets engines sleep")
    share = float(message.split("engine.gpu_memory_utilization=")[1].split()[0])
    smaller = change(keeps, gpu_memory_utilization=share)
    found = sleep_of(sizes_of("8B"), smaller, device=GPU)
    assert not found.inputs.engine_sleeps
    larger = change(keeps, gpu_memory_utilization=0.7)
    with pytest.raises(PreflightError) as e:
        sleep_of(sizes_of("8B"), larger, device=GPU)
    assert "engine.sleep=never" not in str(e.value), "it would not fit either"


def test_engine_sleep_always_with_keep_is_refused_on_a_gpu():
    """Even where only the machine shows that there are GPUs. On CPUs nothing sleeps."""
    both = ("engine.sleep=always", "rollout.resume=keep")
    assert "engine.sleep=always gives up the KV cache" in refusal("+recipe=tiny_gpu", *both)
    config = load("+recipe=tiny_cpu", "runtime.device=auto", "runtime.num_workers=auto", *both)
    with pytest.raises(LayoutError, match=r"take engine\.sleep=auto or never"):
        settle(config, gpus=8, where="this machine")
    _, layout = settle(config, gpus=0, where="this machine")
    assert layout.device == "cpu"


def test_on_cpu_the_plan_leaves_engine_sleep_as_it_is():
    on_cpu = change(INPUTS, device="cpu")
    assert sleep_of(sizes_of("8B"), on_cpu, device=0) == (on_cpu, "")


class Core:
    """A vLLM core that records calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def sleep(self, *, level: int) -> None:
        self.calls.append(level)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)


@pytest.mark.parametrize("sleeps", [False, True])
def test_vllm_sleeps_only_where_it_was_built_for_it(sleeps):
    """Without its allocator for sleep, vLLM fails when it has to sleep."""
    device = AcceleratorDevice(EngineConfig(), sleeps=sleeps)
    assert device.engine_args()["enable_sleep_mode"] is sleeps
    assert device.keeps_kv_cache is not sleeps
    core = Core()
    device.sleep(core)  # type: ignore[arg-type]
    device.wake(core, "weights")  # type: ignore[arg-type]
    assert core.calls == ([2, ["weights"]] if sleeps else [])
