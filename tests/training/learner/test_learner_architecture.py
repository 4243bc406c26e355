"""Details of architectures: noise in training mode, scales of logits, kinds of attention."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_setup import CPU, Example, build_policy, pack
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    OPTConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Starcoder2Config,
)

from april_rl.training.learner.model.architecture import (
    UnsupportedModelError,
    check_device,
    empty_model,
    logit_shape,
    silence,
)
from april_rl.training.learner.model.logprobs import LogitShape
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow

pytestmark = pytest.mark.usefixtures("_group")

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NOISY = [
    Starcoder2Config(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=48,
        residual_dropout=0.1,
        embedding_dropout=0.1,
        attention_dropout=0.1,
    ),
    OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.1, layerdrop=0.1),
    PhimoeConfig(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        router_jitter_noise=0.2,
        input_jitter_noise=0.2,
    ),
]


def build(config: PreTrainedConfig, folder: Path, *, activation_checkpointing: bool) -> Policy:
    """Build a random model of `config` in the way the learner builds it from a folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return build_policy(folder, activation_checkpointing=activation_checkpointing, temperature=1.0)


def example(length: int) -> Example:
    """Return a prompt of two tokens and a response, with `length` tokens in total."""
    token_ids = tuple(3 + (7 * i * i) % 90 for i in range(length))
    return Example(
        token_ids=token_ids,
        num_prompt=2,
        behaviour_logprobs=np.zeros(length - 2, np.float32),
        advantage=0.0,
        age=0,
    )


def learner_logprobs(policy: Policy, examples: Sequence[Example]) -> Tensor:
    logprobs: Tensor = policy(PackedRow.of(pack(examples, total=1), device=CPU))[0]
    return logprobs.detach()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # OPT's layers return a view
@pytest.mark.parametrize("config", NOISY, ids=lambda config: config.model_type)
def test_activation_checkpointing_does_not_switch_dropout_on(config, tmp_path):
    """Two passes are bit-identical. They differed by 1 to 3 nats when dropout stayed on."""
    policy = build(config, tmp_path / "model", activation_checkpointing=True)
    first, second = (learner_logprobs(policy, [example(37)]) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_dropout_of_a_nested_text_configuration_is_turned_off_too():
    """Boolean settings with such a name and unset values stay unchanged."""
    config = Gemma3Config()
    config.text_config.attention_dropout = 0.1
    config.vision_config.attention_dropout = 0.2
    config.text_config.norm_topk_before_dropping = True
    config.text_config.classifier_dropout = None
    silence(config)
    assert config.text_config.attention_dropout == 0
    assert config.vision_config.attention_dropout == 0
    assert config.text_config.norm_topk_before_dropping is True
    assert config.text_config.classifier_dropout is None


def test_activations_are_recomputed_in_evaluation_mode(tmp_path):
    """Each router runs in the forward pass and once more in the backward pass, both in evaluation
    mode. Fails when leaving training mode turns activation checkpointing off.
    """
    policy = build(NOISY[-1], tmp_path / "model", activation_checkpointing=True)
    routers = [module for module in policy.modules() if type(module).__name__ == "PhimoeTopKRouter"]
    runs: list[bool] = []
    for router in routers:
        router.register_forward_hook(lambda module, *_: runs.append(module.training))
    policy(PackedRow.of(pack([example(9)], total=1), device=CPU))[0].sum().backward()
    assert runs == [False] * 2 * len(routers)


def test_a_threshold_whose_name_looks_like_noise_is_kept():
    """Phi-3.5-MoE masks experts by router_jitter_noise even when it does not train."""
    config = PhimoeConfig(router_jitter_noise=0.01)
    silence(config)
    assert config.router_jitter_noise == 0.01


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, LogitShape()),
        ("granite", {"logits_scaling": 8.0}, LogitShape(scale=1 / 8)),
        ("hyperclovax", {"logits_scaling": 8.0}, LogitShape(scale=8.0)),
        ("cohere", {"logit_scale": 0.0625}, LogitShape(scale=0.0625)),
        ("minicpm3", {"dim_model_base": 16}, LogitShape(scale=0.5)),
        ("nanochat", {"final_logit_softcapping": 15.0}, LogitShape(cap=15.0)),
    ],
)
def test_scales_and_soft_caps_of_the_logits_are_measured_on_the_model(
    model_type, changes, expected
):
    """The same setting divides in one architecture and multiplies in another."""
    config = AutoConfig.for_model(model_type, **SIZES, num_key_value_heads=4, **changes)
    shape = logit_shape(empty_model(config, dtype=torch.float32))
    assert shape.scale == pytest.approx(expected.scale, rel=1e-6)
    assert (shape.cap is None) == (expected.cap is None)
    assert (shape.cap or 0.0) == pytest.approx(expected.cap or 0.0, rel=1e-6)


def test_logits_that_are_transformed_in_another_way_are_refused(monkeypatch):
    """Fails when a model that squares its logits, for example, is treated as one that
    scales them.
    """
    model = empty_model(AutoConfig.for_model("llama", **SIZES), dtype=torch.float32)
    plain = type(model).forward

    def square_logits(self, **inputs):
        output = plain(self, **inputs)
        output.logits = output.logits.square()
        return output

    monkeypatch.setattr(type(model), "forward", square_logits)
    with pytest.raises(UnsupportedModelError, match=r"model_type llama .* logits"):
        logit_shape(model)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention is not causal"),
        ("gpt2", {}, "does not consist of a backbone `model`"),
        ("nemotron", {"num_key_value_heads": 4, "head_dim": 8}, "does not pass the sample"),
        ("phimoe", {"sliding_window": 8}, "sliding_window=8. only through an attention mask"),
        ("minimax", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("rwkv", {}, "recurrent state"),
        ("bloom", {}, "cannot be replaced"),
        ("falcon", {}, "cannot build it"),
    ],
)
def test_an_architecture_that_the_learner_cannot_compute_is_refused_by_name(
    model_type, changes, reason
):
    """Before weights are loaded; some of these used to fail in the middle of a run, and some were
    never found.
    """
    small = {} if model_type == "gpt2" else SIZES
    config = AutoConfig.for_model(model_type, **small | changes)
    with pytest.raises(UnsupportedModelError, match=f"model_type {model_type} .*{reason}"):
        empty_model(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("gpt_oss", "sinks"), ("gemma2", "a soft cap .attn_logit_softcapping=50")],
)
def test_attention_without_a_gpu_kernel_is_refused_on_a_gpu(model_type, part):
    empty = empty_model(AutoConfig.for_model(model_type, **SIZES), dtype=torch.float32)
    check_device(empty, CPU)
    with pytest.raises(UnsupportedModelError, match=f"{model_type} is .* on CPUs only: .*{part}"):
        check_device(empty, torch.device("cuda"))


def test_a_model_is_refused_before_its_weights_are_read(tmp_path):
    """The folder has no weights. Fails when the checkpoint is opened first."""
    AutoConfig.for_model("llama4_text", **SIZES).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="model_type llama4_text"):
        build_policy(tmp_path)
