"""learner.keep_attention: layers that are recomputed keep the output of their attention."""

from collections import Counter
from typing import Any

import pytest
import torch
from learner_setup import CPU, Example, build_policy, make_examples, pack
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from april_rl.training.learner.model.attention import KEEP_OUTPUT
from april_rl.training.learner.row import PackedRow

pytestmark = pytest.mark.usefixtures("_group")

NUM_LAYERS = 3


class Kernels(TorchDispatchMode):
    """A dispatch mode that counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def passes(path: str, examples: list[Example], **options: Any) -> tuple[int, dict[str, Tensor]]:
    """Return how often a forward and backward pass call the attention kernel, and the gradients."""
    policy = build_policy(path, **options)
    with Kernels() as kernels:
        logprobs, _ = policy(PackedRow.of(pack(examples, total=1), device=CPU))
        logprobs.sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in policy.named_parameters()}
    return kernels.calls["_scaled_dot_product_flash_attention_for_cpu"], gradients


def test_attention_is_computed_once_and_gradients_are_bit_identical(path):
    """Fails when the output is not kept, or the output of another layer is used."""
    examples = make_examples(path, noise=0.0, age=0)
    once = NUM_LAYERS * len(examples)
    calls, expected = passes(path, examples, activation_checkpointing=0.0)
    assert calls == once
    for keep_attention, wanted in ((False, 2 * once), (True, once)):
        options = {"activation_checkpointing": 1.0, "keep_attention": keep_attention}
        calls, found = passes(path, examples, **options)
        assert calls == wanted
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_output_of_the_gpu_kernel_is_kept_as_well():
    """On the meta device, where nothing is computed."""
    with torch.device("meta"):
        query, key, value = (torch.empty(64, 2, 16, dtype=torch.bfloat16) for _ in range(3))
        starts = torch.empty(3, dtype=torch.int32)
    query.requires_grad_()

    def layer(hidden: Tensor) -> Tensor:
        out = varlen_attn(hidden * 2, key, value, starts, starts, 40, 40, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out * 2

    calls = []
    for options in ({}, KEEP_OUTPUT):
        with Kernels() as kernels:
            checkpoint(layer, query, use_reentrant=False, **options).sum().backward()
        calls.append(kernels.calls["_varlen_attn"])
    assert calls == [2, 1]
