"""LoRA adapters: gradients against plain torch with peft, merged weights, and the base model as
reference.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from composed_config import load
from learner_setup import (
    ALGORITHM,
    CPU,
    PRECISIONS,
    Example,
    learner_logprobs,
    make_examples,
    make_learner,
    pack,
    pack_minibatch,
    plain_logprobs,
    plain_model,
)
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from tiny_architectures import tiny_config
from tiny_models import write_tiny_qwen3_moe
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from april_rl.config.choices import ComputeDtype, Kl
from april_rl.config.lora import LoraConfig
from april_rl.training.learner.frozen_model import FrozenModel
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.model.architecture import empty_model
from april_rl.training.learner.model.lora import LoraError, inject
from april_rl.training.learner.row import PackedRow
from april_rl.training.runtime.worker_parts import build_learner

pytestmark = pytest.mark.usefixtures("_group")

LORA = LoraConfig(rank=3, alpha=12.0)
ATTENTION = replace(LORA, target_modules=["q_proj", "layers.1.self_attn.o_proj"])
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    write_tiny_qwen3_moe(folder)
    return str(folder)


def make_trained(path: str, *, lora: LoraConfig = LORA, **changes: Any) -> Learner:
    """Return a learner after an update, so that B is not zero anywhere."""
    learner = make_learner(path, lora=lora, **changes)
    learner.update([pack_minibatch([make_examples(path, noise=0.3, age=1)])])
    return learner


def in_peft(path: str, folder: Path) -> PeftModel:
    """Return the model with the adapter of an exported folder, in plain float32 torch."""
    return PeftModel.from_pretrained(plain_model(path), folder / "adapter", is_trainable=True)


def gradients(learner: Learner, examples: list[Example]) -> dict[str, torch.Tensor]:
    row = PackedRow.of(pack(examples, total=1), device=CPU)
    logprobs, _ = learner._policy(row)
    (logprobs * row.credits).sum().backward()
    named = learner._policy.named_parameters()
    return {name: p.grad.full_tensor() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("lora", [LORA, ATTENTION], ids=["all", "some"])
def test_the_adapters_get_the_gradients_of_plain_torch_and_peft(
    either_path, tmp_path, lora, activation_checkpointing
):
    """No other weight gets a gradient. Fails when checkpointed layers with a frozen input get none,
    when the scale is not alpha / rank, or when the exported adapter is not the one that was
    trained.
    """
    learner = make_trained(
        either_path, lora=lora, activation_checkpointing=activation_checkpointing
    )
    learner.export(tmp_path / "out")
    model = in_peft(either_path, tmp_path / "out")
    examples = make_examples(either_path, noise=0.0, age=0)
    for example in examples:
        (plain_logprobs(model, example).sum() * example.advantage).backward()
    expected = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    found = gradients(learner, examples)
    assert found.keys() == expected.keys()
    assert len(found) == 2 * (7 * 3 if lora is LORA else 4)
    for name, grad in found.items():
        assert (grad - expected[name]).norm() < 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("compute_dtype", PRECISIONS)
def test_engine_and_checkpoint_get_merged_weights_under_the_names_of_the_model(
    either_path, tmp_path, compute_dtype
):
    """Compared with peft's own merge in float32. Fails when the sum is rounded too early, the scale
    is wrong, or A and B are left out or sent as well.
    """
    learner = make_trained(either_path, lora=ATTENTION, compute_dtype=compute_dtype)
    learner.export(tmp_path / "out")
    sent, stored = dict(learner.weights()), load_file(Path(either_path, "model.safetensors"))
    merged = in_peft(either_path, tmp_path / "out").merge_and_unload()
    assert sent.keys() == stored.keys() == load_file(tmp_path / "out/model.safetensors").keys()
    for name, parameter in merged.named_parameters():
        is_adapted = "q_proj" in name or "layers.1.self_attn.o_proj" in name
        assert torch.equal(sent[name], stored[name]) is not is_adapted, name
        expected = parameter.to(sent[name].dtype)
        assert torch.isclose(sent[name], expected, rtol=2**-7).all(), name
        if compute_dtype is ComputeDtype.bfloat16:
            assert (sent[name] == expected).float().mean() > 0.999, name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, sent[name]) for name, p in again.named_parameters())


def test_before_the_first_step_the_policy_is_the_checkpoint(either_path):
    learner = make_learner(either_path, lora=LORA)
    stored = load_file(Path(either_path, "model.safetensors"))
    assert all(torch.equal(tensor, stored[name]) for name, tensor in learner.weights())
    examples = make_examples(either_path, noise=0.0, age=0)
    whole = learner_logprobs(make_learner(either_path), examples)
    assert torch.equal(learner_logprobs(learner, examples), whole)


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    named = learner._policy.named_parameters()
    return {name: p.detach().full_tensor().clone() for name, p in named}


def matrices(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in parameters(learner).items() if "lora_" in name}


def test_lora_a_is_drawn_from_the_seed_as_in_peft_and_lora_b_is_zero(path):
    drawn, again, other = (matrices(make_learner(path, lora=LORA, seed=seed)) for seed in (5, 5, 6))
    for name, matrix in drawn.items():
        assert torch.equal(matrix, again[name]), name
        if "lora_B" in name:
            assert not matrix.any(), name
            continue
        bound = 1 / math.sqrt(matrix.shape[1])
        assert 0.8 * bound < matrix.abs().max() <= bound, name
        assert matrix.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2), name
        assert not torch.equal(matrix, other[name]), name
    first, second = (
        m
        for name, m in drawn.items()
        if "0.mlp.gate_proj.lora_A" in name or ("0.mlp.up_proj.lora_A" in name)
    )
    assert not torch.equal(first, second)


def test_a_run_trains_the_adapters_of_its_settings_and_seed(path):
    """Fails when a setting in `lora`, or the seed, gets lost between the YAML and the layers."""
    settings = ("lora.rank=2", "lora.alpha=6", "lora.target_modules=[k_proj]", "seed=9")
    precision = "learner.compute_dtype=float32"
    config = load("+recipe=tiny_cpu", f"model.path={path}", precision, *settings)
    learner, _ = build_learner(config, device="cpu")
    lora = LoraConfig(rank=2, alpha=6.0, target_modules=["k_proj"])
    found, expected = matrices(learner), matrices(make_learner(path, lora=lora, seed=9))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    layers = [m for m in learner._policy.modules() if isinstance(m, LoraLayer)]
    assert {layer.scaling["default"] for layer in layers} == {3.0}


def test_only_adapters_have_master_weights_gradients_and_optimizer_state(path):
    """All other weights are stored in the precision of the computation. Fails when the optimizer
    holds the whole model.
    """
    learner = make_learner(path, lora=LORA, compute_dtype=ComputeDtype.bfloat16)
    before = parameters(learner)
    for _ in range(2):
        learner.update([pack_minibatch([make_examples(path, noise=0.1, age=1)])])
    learner._policy.reshard_all()
    after, adapters = parameters(learner), matrices(learner)
    for name, tensor in after.items():
        is_adapter = name in adapters
        assert tensor.dtype is (torch.float32 if is_adapter else torch.bfloat16), name
        assert torch.equal(tensor, before[name]) is not is_adapter, name
    assert len(adapters) == 2 * 7 * 3
    moments = [tensor for piece in learner._optimizer._pieces for tensor in piece.tensors()]
    assert len(moments) == 3 * len(adapters)  # plus a step count


@pytest.mark.parametrize("compute_dtype", PRECISIONS)
def test_the_reference_is_the_policy_without_its_adapters(path, compute_dtype):
    """It is bit-identical to a second model, without its memory, and training continues as it would
    without a reference. Fails when adapters stay on, stay off, or are not trained from the first
    forward pass.
    """
    algorithm = replace(ALGORITHM, kl=Kl.k3, kl_coefficient=0.1)
    settings = {"algorithm": algorithm, "compute_dtype": compute_dtype}
    learner = make_learner(path, lora=LORA, **settings)
    examples = make_examples(path, noise=0.1, age=1)
    divergences = [
        learner.update([pack_minibatch([examples])]).read()["loss/reference_kl"] for _ in range(3)
    ]
    assert divergences[0] == 0.0
    assert divergences[-1] > 1e-4
    rows = [[PackedRow.of(pack(examples, total=1), device=CPU)]]
    [[own]] = learner._reference.logprobs(rows)
    second = make_learner(path, **settings)._reference
    assert isinstance(second, FrozenModel)
    assert torch.equal(own, second.logprobs(rows)[0][0])
    assert not torch.equal(own, learner_logprobs(learner, examples))
    assert all(isinstance(p.grad, DTensor | None) for p in learner._policy.parameters())


@pytest.mark.parametrize(
    ("names", "culprit"),
    [(["q_proj", "c_attn"], "c_attn"), (["lm_head"], "lm_head"), (["embed_tokens"], "embed_")],
)
def test_a_wrong_target_module_is_refused_with_the_possible_names(path, names, culprit):
    """The output layer and the embedding cannot have adapters here: the learner computes logits in
    another way, and an embedding multiplies nothing.
    """
    with pytest.raises(LoraError, match=rf"^lora\.target_modules=.*: {culprit}") as caught:
        make_learner(path, lora=replace(LORA, target_modules=names))
    assert str(caught.value).endswith(", ".join(LINEAR))


@pytest.mark.parametrize(
    "names", [None, ["gate_proj", "up_proj", "down_proj"], ["gate_proj", "q_proj"]]
)
def test_adapters_on_experts_are_refused(moe_path, names):
    """One dense layer of the model has linear layers of these names. Fails when peft puts adapters
    on experts in its own way, or silently leaves them out.
    """
    with pytest.raises(LoraError, match=r"^lora\.target_modules: the experts") as caught:
        make_learner(moe_path, lora=replace(LORA, target_modules=names))
    assert "q_proj, k_proj, v_proj, o_proj" in str(caught.value)


def test_adapters_on_all_layers_are_refused_where_every_layer_has_experts(moe_path):
    """Only attention is linear there. Fails when "all" is understood as attention only."""
    config = AutoConfig.from_pretrained(moe_path, mlp_only_layers=[])
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(LoraError, match="the experts"):
        inject(model, LORA)


def test_the_layers_that_peft_refuses_are_named():
    """Fails when the user sees peft's error without the name of the setting."""
    config = tiny_config("falcon_h1")
    with pytest.raises(LoraError, match=r"^lora\.target_modules=null: .*'out_proj'.*q_proj"):
        inject(empty_model(config, dtype=torch.float32), LORA)


def test_attention_in_a_mixture_of_experts_can_have_adapters(moe_path):
    """Weights have the names of the checkpoint, one tensor per expert, and only
    attention changes.
    """
    attention = replace(LORA, target_modules=LINEAR[:4])
    sent = dict(make_trained(moe_path, lora=attention).weights())
    stored = load_file(Path(moe_path, "model.safetensors"))
    assert sent.keys() == stored.keys()
    for name, tensor in sent.items():
        assert torch.equal(tensor, stored[name]) is not name.endswith(
            tuple(f".self_attn.{layer}.weight" for layer in LINEAR[:4])
        ), name
