"""FlashAttention-4 of vLLM's build for CUDA behind torch's registry, without a GPU."""

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _fa4, current_flash_attention_impl, restore_flash_attention_impl

from april_rl.errors import RunError
from april_rl.training.learner.model.attention import use_flash_attention_4

# Parameters of vLLM 0.32's vllm_flash_attn/cute/interface.py; torch passes most of them by name.
FORWARD = """q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k
    min_seqlen_k page_table softmax_scale causal dynamic_causal softcap window_size_left
    window_size_right num_splits return_lse out lse"""
BACKWARD = """q k v out dout lse softmax_scale causal softcap window_size_left window_size_right
    cu_seqlens_q cu_seqlens_k deterministic"""


def stand_in(parameters: str, *results: Tensor, calls: list[dict[str, Any]]) -> Any:
    """Return a function with these parameters that notes its arguments."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(n, kind) for n in parameters.split()])

    def function(*inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
        calls.append(signature.bind_partial(*inputs, **options).arguments)
        return results

    return function


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Put kernels in the place of the wheel's: the forward one returns four values."""
    found: list[dict[str, Any]] = []
    interface, package = ModuleType("interface"), ModuleType("cute")
    one, two, three = (torch.full((1,), float(number)) for number in (1, 2, 3))
    vars(interface)["_flash_attn_fwd"] = stand_in(FORWARD, one, two, three, three, calls=found)
    vars(interface)["_flash_attn_bwd"] = stand_in(BACKWARD, one, two, three, calls=found)
    vars(package)["interface"] = interface
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.cute", package)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.cute.interface", interface)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield found
    restore_flash_attention_impl(_raise_warn=False)
    sys.modules.pop("april_rl.training.engine.flash_attention_4", None)
    _fa4._fa4_import_module.cache_clear()


def test_torch_gets_the_values_that_it_unpacks(calls):
    """Fails when an argument of torch's call has another name in the wheel, or more than the output
    and its normaliser come back.
    """
    use_flash_attention_4()
    assert current_flash_attention_impl() == "FA4"
    q = torch.zeros(3, 2, 8)
    starts = torch.tensor([0, 1, 3])
    given = {"scale": 0.5, "is_causal": True, "window_size_left": 7, "window_size_right": 0}
    output, normaliser = _fa4._fa4_run_forward(
        q, q, q, starts, starts, max_q=2, max_k=2, seqused_k=None, **given
    )
    assert (output, normaliser) == (1, 2)
    found = _fa4._fa4_run_backward(q, q, q, q, output, normaliser, starts, starts, **given)
    assert found == (1, 2, 3)
    for call in calls:
        assert (call["softmax_scale"], call["causal"], call["window_size_left"]) == (0.5, True, 7)


@pytest.mark.parametrize(
    ("capability", "message"), [((8, 6), "compute capability 8.6"), ((9, 0), "requires the CUDA")]
)
def test_a_machine_without_it_is_refused(capability, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(RunError, match=rf"flash_attention_4=true needs .*{message}.*to false"):
        use_flash_attention_4()
