"""Compiled functions of the learner against the same functions run operation by operation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_setup import CPU, Example, build_policy, pack
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from april_rl.config.lora import LoraConfig
from april_rl.training.learner.model import fused, model_sizes
from april_rl.training.learner.model.fused import CompilerError, check_compiler, fuse
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("_group"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler reads this
]

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = [
    pytest.param(Qwen3Config(**SIZES), id="qwen3"),
    pytest.param(LlamaConfig(**SIZES, tie_word_embeddings=True), id="llama, tied"),
    pytest.param(Qwen3MoeConfig(**SIZES, **EXPERTS), id="qwen3_moe"),
    # its functions have different code, which takes long to compile
    pytest.param(Gemma2Config(**SIZES), id="gemma2, soft cap", marks=pytest.mark.soak),
]
LENGTHS = (7, 41, 18)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config: PreTrainedConfig = request.param
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def build(folder: Path, *, is_fused: bool, dtype: torch.dtype, **options: Any) -> Policy:
    policy = build_policy(folder, fused=is_fused, compute_dtype=dtype, **options)
    policy.lm_head._block_bytes = 4 * sum(LENGTHS) * 128  # 300 = 128 + 128 + 44
    return policy


def outputs(policy: Policy, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropy of the responses of one row, after a backward pass."""
    examples = [
        Example(
            token_ids=tuple(3 + (7 * i * i + start) % 290 for i in range(length)),
            num_prompt=2,
            behaviour_logprobs=np.zeros(length - 2, np.float32),
            advantage=0.0,
            age=0,
        )
        for start, length in enumerate(lengths)
    ]
    logprobs, entropy = policy(PackedRow.of(pack(examples, total=1), device=CPU))
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), entropy


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in policy.named_parameters()}


def rotate(attention: nn.Module) -> Tensor:
    """Return queries and keys in bfloat16 after the rotary embedding that an attention calls."""
    function = attention.forward.__func__.__globals__["apply_rotary_pos_emb"]
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 4, 500, 16, generator=generator).bfloat16()
    angles = 6 * torch.rand(1, 500, 16, generator=generator)
    return torch.stack(function(query, key, angles.cos().bfloat16(), angles.sin().bfloat16()))


def num_compiled_calls() -> int:
    return torch._dynamo.utils.counters["stats"]["calls_captured"]


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_in_float32_log_probabilities_and_gradients_are_equal(folder, activation_checkpointing):
    """Fails when a compiled function computes something else, or nothing is compiled."""
    options = {"dtype": torch.float32, "activation_checkpointing": activation_checkpointing}
    plain, compiled = (build(folder, is_fused=each, **options) for each in (False, True))
    assert [type(m) for m in plain.modules()] == [type(m) for m in compiled.modules()]
    for lengths in (LENGTHS, (9, 30)):
        expected, found = outputs(plain, lengths), outputs(compiled, lengths)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)
        wanted = gradients(plain)
        for name, gradient in gradients(compiled).items():
            assert (gradient - wanted[name]).norm() <= 1e-6 * wanted[name].norm() + 1e-9, name
    assert num_compiled_calls() > 0


def test_in_bfloat16_compiled_functions_round_like_single_operations(folder):
    """Only a different order of sums may change a rounding. Fails when roundings between operations
    are left out; a quarter of the elements would then differ from the engine's.
    """
    torch.manual_seed(0)
    plain, compiled = (
        build(folder, is_fused=each, dtype=torch.bfloat16).bfloat16() for each in (False, True)
    )
    for unit in (*plain.modules(), *compiled.modules()):
        if isinstance(unit, FSDPModule):
            unit.unshard()
    num_compared = 0
    for one, same in zip(plain.model.modules(), compiled.model.modules(), strict=True):
        if "forward" in vars(same):
            if type(one).__name__.endswith("Attention"):
                found, expected = (rotate(each) for each in (same, one))
                assert torch.equal(found, expected), type(one)
                num_compared += 1
                continue
            width = next(same.parameters()).shape[-1]
            values = torch.randn(1, 500, width, dtype=torch.bfloat16)
            assert (one(values) != same(values)).float().mean() <= 0.002, type(one)
            num_compared += 1
    assert num_compared >= 7  # two of them are attentions


def test_the_error_on_a_machine_that_cannot_compile_says_what_to_do(monkeypatch):
    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(fused, "compile_function", lambda _: fail)
    with pytest.raises(
        CompilerError, match=r"learner\.fused: .* install one, or set learner.fused"
    ):
        check_compiler(CPU)


@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig])
def test_the_memory_plan_counts_what_compiled_functions_keep(kind):
    """On a device without kernels, to the byte. Fails when the plan counts the single operations,
    which keep half as much again, or divides a function in another way than the compiler.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 320, "moe_intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = kind(**sizes, head_dim=48, num_experts=8, vocab_size=1000)
    compiled = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    fuse(compiled.model)
    expected = model_sizes._Kept(compiled, compiled.model.layers).num_bytes
    found, single = (
        model_sizes.model_sizes(config, LoraConfig(), is_fused=is_fused).activation_bytes
        for is_fused in (True, False)
    )
    assert found == expected / 512  # bytes of a token
    assert single > 1.15 * found
