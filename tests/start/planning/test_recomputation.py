"""learner.activation_checkpointing=auto decides the share of recomputed layers, and
learner.keep_attention=auto decides whether these keep the output of their attention.
"""

import pytest
from composed_config import load
from planned_models import GPU, HUB, INPUTS, change, sizes_of

from april_rl.start.planning.engine_sleep import decide_sleep_and_resume
from april_rl.start.planning.layout import settle
from april_rl.start.planning.memory_check import Room
from april_rl.start.planning.memory_inputs import Beside, memory_inputs
from april_rl.start.planning.memory_plan import GIB, plan_memory
from april_rl.start.planning.recomputation import settle_recomputation
from april_rl.training.learner.model.sizes import recomputed_layers

ROOM = Room(device=GPU, free=0.98 * GPU)
AUTO = change(INPUTS, activation_checkpointing="auto", keep_attention=False, max_tokens=32768)
# Bytes per token: outputs of 36 layers, 32 heads of 128 numbers, and a float32 for each head.
ATTENTION_OF_4B = 36 * 32 * (2 * 128 + 4)


def backward_bytes(name: str, share: float) -> float:
    inputs = change(AUTO, activation_checkpointing=share)
    return plan_memory(sizes_of(name), inputs, device_bytes=GPU).phases[1].total


def test_auto_is_the_smallest_share_of_layers_that_leaves_a_tenth_of_the_gpu() -> None:
    """With one layer fewer it would not. 4B on eight GPUs, rows of 32,768 tokens."""
    found = settle_recomputation(sizes_of("4B"), AUTO, room=ROOM)
    share = found.inputs.recomputed_share
    count = len(recomputed_layers(share, num_layers=36))
    assert 0 < count < 36
    assert backward_bytes("4B", share) <= 0.88 * GPU < backward_bytes("4B", (count - 1) / 36)
    needs = f"{backward_bytes('4B', share) / GIB:.1f} of a GPU's 78.4 GiB"
    assert f"auto: {share:g} ({count} of 36 layers" in found.reason
    assert found.reason.endswith(f"the smallest share that leaves a margin: backward needs {needs}")


@pytest.mark.parametrize(
    ("tokens", "share", "said"),
    [(1024, 0.0, "the smallest share"), (250_000, 1.0, "which leaves no margin: backward needs")],
)
def test_auto_is_none_where_all_activations_fit_and_all_where_nothing_does(tokens, share, said):
    inputs = change(AUTO, max_tokens=tokens)
    found = settle_recomputation(sizes_of("4B"), inputs, room=ROOM)
    assert found.inputs.recomputed_share == share
    assert said in found.reason


@pytest.mark.parametrize("given", [False, True, 0.5])
def test_an_explicit_share_is_kept_without_a_message(given) -> None:
    inputs = change(INPUTS, activation_checkpointing=given, keep_attention=False)
    assert settle_recomputation(sizes_of("4B"), inputs, room=ROOM) == (inputs, "")


def test_attention_is_kept_where_a_share_of_the_layers_then_fits() -> None:
    """The share is then the smallest that fits with it. Fails when the plan does not count what is
    kept.
    """
    inputs = change(AUTO, keep_attention="auto")
    found = settle_recomputation(sizes_of("4B"), inputs, room=ROOM)
    share, count = found.inputs.recomputed_share, round(36 * found.inputs.recomputed_share)
    assert found.inputs.keeps_attention
    kept = 32768 * ATTENTION_OF_4B * count / 36
    assert backward_bytes("4B", share) + kept <= 0.88 * GPU
    assert backward_bytes("4B", (count - 1) / 36) + kept * (count - 1) / count > 0.88 * GPU
    assert "; learner.keep_attention=true: backward needs" in found.reason


def test_attention_is_recomputed_where_nothing_else_fits() -> None:
    """Rows of 100,000 tokens, for which nearly all layers are recomputed."""
    inputs = change(AUTO, keep_attention="auto", max_tokens=100_000)
    found = settle_recomputation(sizes_of("4B"), inputs, room=ROOM)
    assert not found.inputs.keeps_attention
    assert "the smallest share that leaves a margin; learner.keep_attention=false" in found.reason


def test_only_the_decision_about_attention_is_reported_when_the_share_is_explicit() -> None:
    inputs = change(INPUTS, keep_attention="auto")
    found = settle_recomputation(sizes_of("4B"), inputs, room=ROOM)
    assert found.reason.startswith("learner.keep_attention=true: backward needs ")
    inputs = change(inputs, activation_checkpointing=False)
    assert settle_recomputation(sizes_of("4B"), inputs, room=ROOM).reason == ""


def test_the_run_gets_the_share_and_reports_it() -> None:
    """The larger the GPU, the fewer layers. Fails when the decision does not reach the learner."""
    shares = []
    for gib in (40, 80):
        config, layout = settle(load("+recipe=qwen3_4b_dapo"), gpus=8, where="here")
        room = Room(device=gib * GIB, free=0.98 * gib * GIB)
        model = sizes_of(HUB[config.model.path])
        inputs = memory_inputs(config, layout, Beside())
        decided = decide_sleep_and_resume(config, inputs, model=model, room=room)
        shares.append(decided.config.learner.recomputed_share)
        assert any(f"checkpointing=auto: {shares[-1]:g} (" in each for each in decided.reasons)
    assert 1 >= shares[0] > shares[1] > 0


def test_recomputed_layers_are_spread_evenly() -> None:
    assert recomputed_layers(0.5, num_layers=6) == [0, 2, 4]
    assert recomputed_layers(1 / 3, num_layers=6) == [0, 3]
    assert recomputed_layers(2 / 3, num_layers=6) == [0, 2, 3, 5]
    assert recomputed_layers(0.0, num_layers=6) == []
    for count in range(37):
        assert len(recomputed_layers(round(count / 36, 3), num_layers=36)) == count
