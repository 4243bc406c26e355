"""The learner on a GPU: its attention kernel, what offloading frees, and the memory plan against
the memory that is really used.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_setup import Example, learner_logprobs, make_learner, pack_minibatch
from planned_models import INPUTS, change
from tiny_models import write_tiny_qwen3
from torch import Tensor, nn
from torch.nn.attention import restore_flash_attention_impl

from april_rl.config.choices import ComputeDtype, Offload
from april_rl.errors import RunError
from april_rl.start.planning.memory_plan import plan_memory
from april_rl.start.planning.model import read_model
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.model.attention import (
    Packing,
    packed_attention,
    use_flash_attention_4,
)
from april_rl.training.learner.model.model_sizes import model_sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="needs a GPU: torch.accelerator finds none"
    ),
]
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64
LENGTHS = (5, 1, 130, 64)
NUM_TOKENS, NUM_ROWS = 4096, 2


def this_device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attention_and_gradients(qkv: list[Tensor], slope: Tensor, window: int | None) -> list[Tensor]:
    """Return the output [1, T, Q, D] and the gradients of queries, keys and values, in float32."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    packing = Packing.of(LENGTHS, device=slope.device)
    chosen = {"packing": packing, "scaling": 0.125, "sliding_window": window}
    out, _ = packed_attention(nn.Identity(), *leaves, None, **chosen)
    gradients = torch.autograd.grad((out.float() * slope).sum(), leaves)
    return [x.detach().float() for x in (out, *gradients)]


def attention_in_both_precisions(
    device: torch.device, window: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Compute the half-precision kernel and SDPA in float32 on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    size = sum(LENGTHS)
    qkv = [
        torch.randn(1, heads, size, HEAD_DIM, generator=generator).bfloat16().to(device)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    slope = torch.randn(1, size, HEADS, HEAD_DIM, generator=generator).to(device)
    half = attention_and_gradients(qkv, slope, window)
    whole = attention_and_gradients([x.float() for x in qkv], slope, window)
    return list(zip(half, whole, strict=True))


@pytest.fixture(params=[2, 4])
def _flash_attention(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == 4:
        try:
            use_flash_attention_4()
        except RunError as error:
            pytest.skip(str(error))
    yield
    restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.usefixtures("_flash_attention")
@pytest.mark.parametrize("window", [None, 1, 20, 129])
def test_the_varlen_kernel_computes_what_sdpa_does(window):
    """In values and gradients. Fails when a sequence sees another one, a token sees a later one, or
    the two count a window differently.
    """
    for half, whole in attention_in_both_precisions(this_device(), window):
        torch.testing.assert_close(half, whole, atol=0.05, rtol=0.05)


def build(folder: Path, device: torch.device, *, offload: Offload) -> Learner:
    """Build a model of thirty million parameters: tensors use most of the memory, and the logits
    fill more than one block.
    """
    write_tiny_qwen3(folder, hidden_size=512, num_layers=8, vocab_size=32768)
    return make_learner(
        str(folder),
        device=device.type,
        compute_dtype=ComputeDtype.bfloat16,
        offload=offload,
        max_mismatch=1e9,
    )


def rows() -> list[Example]:
    rng = np.random.default_rng(0)
    return [
        Example(
            token_ids=tuple(rng.integers(3, 98, NUM_TOKENS).tolist()),
            num_prompt=16,
            behaviour_logprobs=np.full(NUM_TOKENS - 16, -4.0, np.float32),
            advantage=1.0,
            age=0,
        )
        for _ in range(NUM_ROWS)
    ]


def state(learner: Learner) -> list[Tensor]:
    """Return the weights as they are sent and all log-probabilities of a row, on the CPU."""
    sent = [tensor.cpu() for _, tensor in learner.weights()]
    return [*sent, learner_logprobs(learner, rows()[:1]).cpu()]


def test_offload_frees_weights_and_optimizer_state_and_restores_them_bit_by_bit(tmp_path):
    """They take 12 bytes per parameter. Fails when something stays on the device, or comes back
    changed.
    """
    learner = build(tmp_path, this_device(), offload=Offload.all)
    learner.update([pack_minibatch([[example] for example in rows()])])
    before = state(learner)
    learner.offload()  # frees the weights that the last forward pass gathered
    learner.reload()
    resident = torch.accelerator.memory_allocated()
    learner.offload()
    num_parameters = sum(p.numel() for p in learner._policy.parameters())
    freed = resident - torch.accelerator.memory_allocated()
    assert freed == pytest.approx(12 * num_parameters, rel=0.02)
    for mine, expected in zip(state(learner), before, strict=True):
        assert torch.equal(mine, expected)


def plan_items(folder: Path) -> dict[str, dict[str, float]]:
    """Return the items of each phase of the memory plan for the learner above."""
    sizes = {"max_tokens": NUM_TOKENS, "longest_tokens": NUM_TOKENS}
    inputs = change(
        INPUTS, num_workers=1, activation_checkpointing=False, cuda_graphs=False, **sizes
    )
    model = model_sizes(read_model(str(folder)), inputs.lora)
    plan = plan_memory(model, inputs, device_bytes=1.0)
    return {phase.name: phase.items for phase in plan.phases}


def test_the_plan_of_the_backward_pass_is_its_measured_peak(tmp_path):
    """In the second update, when there is optimizer state. The plan may be a quarter too high, but
    never too low.
    """
    learner = build(tmp_path, this_device(), offload=Offload.none)
    minibatch = pack_minibatch([[example] for example in rows()])
    learner.update([minibatch])
    torch.accelerator.reset_peak_memory_stats()
    learner.update([minibatch])
    peak = torch.accelerator.max_memory_allocated()
    expected = sum(plan_items(tmp_path)["backward"].values())
    assert 0.75 * expected <= peak <= expected
