"""engine.gpu_memory_utilization=auto: the share of a GPU, and whether engines then stay awake."""

from functools import cache

import pytest
from composed_config import load
from planned_models import HUB, sizes_of

from april_rl.start.planning.engine_sleep import Decided, decide_sleep_and_resume
from april_rl.start.planning.kv_room import kv_demand, planned_kv_tokens
from april_rl.start.planning.layout import settle
from april_rl.start.planning.memory_check import Room
from april_rl.start.planning.memory_inputs import Beside, memory_inputs
from april_rl.start.planning.memory_plan import GIB, engine_workspace

ALL_RECOMPUTED = ("learner.activation_checkpointing=true", "learner.keep_attention=false")
NUM_GIB = (24, 48, 80, 141, 180)
# By recipe: the share on GPUs of each size; z marks engines that sleep during updates.
SHARES = {
    "qwen3_0_6b_smoke": "0.41 0.46 0.62 0.73 0.76",
    "paper/r1_distill_1_5b_dapo_math_grpo": "0.81z 0.49 0.29 0.38 0.49",
    "qwen3_4b_dapo": "0.68z 0.82z 0.85z 0.59 0.46",
    "qwen3_5_4b_dapo": "0.67z 0.81z 0.5 0.31 0.27",
    "qwen3_8b_dapo": "0.75z 0.85z 0.85z 0.59 0.47",
    "qwen3_30b_a3b_gspo": "0.85z 0.85z 0.85z 0.5 0.39",
}


@cache
def decide(recipe: str, *overrides: str, gib: float) -> Decided:
    config = load(f"+recipe={recipe}", *overrides)
    gpus = config.runtime.num_workers
    assert isinstance(gpus, int)
    config, layout = settle(config, gpus=gpus, where="here")
    model = sizes_of(HUB[config.model.path], rank=config.lora.rank)
    room = Room(device=gib * GIB, free=0.98 * gib * GIB)
    inputs = memory_inputs(config, layout, Beside())
    return decide_sleep_and_resume(config, inputs, model=model, room=room)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SHARES)
def test_engines_stay_awake_where_their_cache_still_fits_the_samples_in_flight(recipe: str) -> None:
    found = []
    for gib in NUM_GIB:
        inputs = decide(recipe, gib=gib).inputs
        found.append(f"{inputs.gpu_share:g}{'z' if inputs.engine_sleeps else ''}")
    assert " ".join(found) == SHARES[recipe]


@pytest.mark.slow
@pytest.mark.parametrize("gib", NUM_GIB)
@pytest.mark.parametrize("recipe", SHARES)
def test_no_layer_is_recomputed_for_a_cache_that_nobody_needs(recipe: str, gib: float) -> None:
    """Fails when an engine takes memory with which the learner's update would be shorter."""
    decided = decide(recipe, gib=gib)
    model = sizes_of(HUB[decided.config.model.path])
    inputs, needed = decided.inputs, kv_demand(decided.config, decided.inputs.layout)
    cache = planned_kv_tokens(
        model, inputs, device_bytes=gib * GIB, workspace=engine_workspace(inputs)
    )
    # What is left may be a hundredth of a GPU, or too little for another layer.
    layer = (model.activation_bytes - model.checkpointed_bytes) / model.num_layers
    left = 0.01 * gib * GIB + 1.5 * layer * inputs.learner.max_tokens
    left *= inputs.layout.tensor_parallel_size / model.kv_numbers / inputs.kv_bytes
    if not inputs.engine_sleeps and inputs.recomputed_share:
        assert cache <= 1.25 * needed.total_tokens + left


def largest_awake_share(learner_bytes: float, *, gib: float) -> float:
    """Return what is left of 0.98 of a GPU next to the learner, NCCL (1 GiB) and a
    margin of 0.1.
    """
    return 0.98 - 0.1 - (learner_bytes + GIB) / (gib * GIB)


@pytest.mark.parametrize("gib", [80, 141])
def test_the_share_matches_a_manual_calculation_for_4b_on_eight_gpus(gib: int) -> None:
    """The peak is the backward pass: 16 bytes per parameter over 8 GPUs; in bfloat16 the tied
    embedding and its gradient, two layers and the gradient of one, which is also copied into
    float32; 361 KiB of activations per token (docs/gpu.md).
    """
    embedding, layer = 151_936 * 2560, 101e6
    learner = 16 * 4.022e9 / 8 + 4 * embedding + (4 + 6) * layer + 32_768 * 361 * 1024
    share = largest_awake_share(learner, gib=gib)
    cache_bytes = share * gib * GIB - 2 * 4.022e9 - 1.5e9 - GIB
    needed_bytes = (2048 / 8 + 20480 / 2) * 1.25 * 32 * 8 / 8 * 144 * 1024
    found = decide("qwen3_4b_dapo", *ALL_RECOMPUTED, gib=gib).inputs
    assert found.engine_sleeps is (cache_bytes < needed_bytes)
    expected = 0.85 if found.engine_sleeps else share
    assert found.gpu_share == pytest.approx(expected, abs=0.015)


def test_the_share_matches_a_manual_calculation_for_30b_on_eight_large_gpus() -> None:
    """The peak is the backward pass: 8 bytes per parameter over 8 GPUs, since the optimizer state
    is offloaded; otherwise as above, with the output layer instead of the embedding.
    """
    head, layer = 151_936 * 2048, 623e6
    learner = 8 * 30.53e9 / 8 + 4 * head + (4 + 6) * layer + 32_768 * 395 * 1024
    share = largest_awake_share(learner, gib=141)
    on_four_gpus = 4 * (share * 141 * GIB - 1.5e9 - 2 * GIB) - 2 * 30.53e9
    needed = (2048 / 8 + 20480 / 2) * 1.25 * 32 * 8 / 2 * 2 * 48 * 4 * 128 * 2
    found = decide("qwen3_30b_a3b_gspo", *ALL_RECOMPUTED, gib=141).inputs
    assert found.engine_sleeps is (on_four_gpus < needed) is False
    assert found.gpu_share == pytest.approx(share - 0.005, abs=0.005)


def test_more_samples_in_flight_need_a_larger_cache_and_engines_that_sleep() -> None:
    """α 2 with 141 GiB: 671,744 tokens."""
    awake, asleep = (
        decide("qwen3_4b_dapo", f"rollout.over_sampling_factor={factor}", gib=141)
        for factor in ("1.25", "2")
    )
    assert (awake.inputs.engine_sleeps, awake.inputs.gpu_share) == (False, 0.59)
    assert (asleep.inputs.engine_sleeps, asleep.inputs.gpu_share) == (True, 0.85)
    assert "may need 671,744" in asleep.reasons[0]


@pytest.mark.parametrize(
    ("override", "share", "sleeps"),
    [
        ("engine.sleep=never", 0.61, False),
        ("rollout.resume=keep", 0.61, False),
        ("engine.sleep=always", 0.85, True),
        ("engine.gpu_memory_utilization=0.5", 0.5, False),
        ("engine.gpu_memory_utilization=0.65", 0.65, True),
    ],
)
def test_explicit_values_are_kept_and_auto_depends_on_them(override, share, sleeps) -> None:
    """Fails when auto lets engines sleep that must stay awake, or changes an explicit share."""
    found = decide("qwen3_4b_dapo", override, gib=80)
    assert (found.inputs.gpu_share, found.inputs.engine_sleeps) == (share, sleeps)
    assert found.config.engine == found.inputs.engine
    said = [each for each in found.reasons if each.startswith("engine.gpu_memory_utilization=auto")]
    assert len(said) == ("utilization" not in override)
