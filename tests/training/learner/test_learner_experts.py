"""Mixtures of experts: one tensor per expert on disk, one tensor per layer in the learner."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from learner_setup import (
    CPU,
    build_policy,
    check_gradients,
    group_of_one,
    make_examples,
    make_learner,
    pack,
    plain_model,
    rewrite,
)
from safetensors.torch import load_file
from tiny_architectures import tiny_config, tiny_model
from tiny_models import write_tiny_qwen3_moe
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from april_rl.training.learner.model.checkpoint import ModelFolderError
from april_rl.training.learner.model.export import export
from april_rl.training.learner.model.names import StoredNames, UnknownLayoutError
from april_rl.training.learner.row import PackedRow

NUM_EXPERTS = 6
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "nemotron_h", "kimi_linear")


@pytest.fixture
def _group():
    with group_of_one():
        yield


in_a_group = pytest.mark.usefixtures("_group")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_tiny_qwen3_moe(folder, num_experts=NUM_EXPERTS)
    return str(folder)


@in_a_group
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_gradients_equal_computing_the_experts_one_after_another(path, activation_checkpointing):
    """Also for the router. Fails when the gate and up matrices are swapped, or experts are mixed
    up.
    """
    policy = build_policy(path, activation_checkpointing=activation_checkpointing)
    check_gradients(policy, path)


@in_a_group
def test_an_expert_without_tokens_gets_a_zero_gradient(path):
    """Two tokens reach at most four of six experts."""
    policy = build_policy(path)
    examples = make_examples(path, noise=0.0, age=0)[1:2]  # 1 + 1 tokens
    row = PackedRow.of(pack(examples, total=1), device=CPU)
    policy(row)[0].sum().backward()
    grads = {n: p.grad.full_tensor() for n, p in policy.named_parameters() if p.dim() == 3}
    for name, grad in grads.items():
        is_reached = grad.flatten(1).norm(dim=1) > 0  # [E]
        assert 2 <= is_reached.sum() < NUM_EXPERTS, name
        assert grad.isfinite().all(), name


@in_a_group
def test_an_export_of_experts_has_the_bits_of_the_checkpoint_and_loads(path, tmp_path):
    stored = load_file(Path(path, "model.safetensors"))
    make_learner(path).export(tmp_path / "once")
    once = load_file(tmp_path / "once" / "model.safetensors")
    make_learner(str(tmp_path / "once")).export(tmp_path / "twice")
    twice = load_file(tmp_path / "twice" / "model.safetensors")
    assert stored.keys() == once.keys() == twice.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, once[name]), name
        assert torch.equal(tensor, twice[name]), name
    plain, again = plain_model(path), plain_model(str(tmp_path / "twice"))
    for key, parameter in plain.named_parameters():
        assert torch.equal(parameter, again.get_parameter(key)), key


@in_a_group
def test_files_of_an_export_are_planned_by_the_sizes_of_single_experts(path, tmp_path):
    """Fails when the plan uses the sizes of the learner's parameters, which are fewer
    and larger.
    """
    policy, target = build_policy(path), tmp_path / "parts"
    max_bytes = 40_000
    export(
        policy.gather(torch.bfloat16),
        dtype=torch.bfloat16,
        sizes=policy.stored_bytes(torch.bfloat16),
        source=Path(path),
        target=target,
        max_bytes=max_bytes,
    )
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    stored = load_file(Path(path, "model.safetensors"))
    assert weight_map.keys() == stored.keys()
    for file in set(weight_map.values()):
        tensors = load_file(target / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= max_bytes
        assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())


# Ranks, ranks that share a copy, and the rank that is asked. Torch remembers a mesh of this process
# with the rank that built it first, so every mesh is listed once.
MESHES = [(3, 3, 1), (5, 5, 2), (7, 7, 6), (6, 3, 5), (8, 4, 6), (10, 5, 8)]


@pytest.mark.parametrize(("num_ranks", "shard_size", "rank"), MESHES)
def test_a_rank_of_any_mesh_holds_its_rows_of_every_parameter(path, num_ranks, shard_size, rank):
    """In plain and hybrid meshes, with a number of experts that is not divisible, and with ranks
    that hold none. Rows of dimension 0 are split into blocks of ⌈rows / ranks that share a copy⌉.
    Fails when a rank reads the experts of another rank, or uses its rank in the world instead of
    its rank in the copy.
    """
    whole = dict(plain_model(path).named_parameters())
    dist.init_process_group("fake", rank=rank, world_size=num_ranks)
    try:
        policy = build_policy(path, shard_size=shard_size)
        held = {name: p.to_local() for name, p in policy.named_parameters()}
    finally:
        dist.destroy_process_group()
    for name, expected in whole.items():
        block = -(-expected.shape[0] // shard_size)
        start = rank % shard_size * block
        assert torch.equal(held[name], expected[start : start + block]), name


@pytest.mark.filterwarnings("ignore")  # transformers warns about tiny configurations
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_match_what_transformers_would_save(family):
    """With equal names and identical bits. Fails when an expert's matrices are split at the wrong
    row.
    """
    model = tiny_model(tiny_config(family))
    tensors = model.state_dict()
    expected = revert_weight_conversion(model, dict(tensors))
    names = StoredNames(model)
    found = {
        part.name: (part, tensor)
        for name, tensor in tensors.items()
        for part in names.stored_parts(name, tensor.shape)
    }
    assert found.keys() == expected.keys()
    for name, (part, tensor) in found.items():
        assert part.shape == expected[name].shape, name
        assert torch.equal(part.of(tensor), expected[name]), name


def test_a_checkpoint_with_another_layout_is_refused_with_its_tensor_names():
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(tiny_config("hrm_text"))
    names = StoredNames(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(UnknownLayoutError, match=r"model\.path: .*where the learner has"):
        [names.stored_parts(name, shape) for name, shape in shapes.items()]


@in_a_group
def test_a_missing_expert_is_named(path, tmp_path):
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    with pytest.raises(ModelFolderError, match=r"1 \(model\.layers\.0\.mlp\.experts\.3\.up_proj"):
        make_learner(rewrite(path, tmp_path, **{name: None}))


@in_a_group
def test_an_expert_of_another_width_is_named(path, tmp_path):
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    changes = {name: torch.ones(7, 64)}
    with pytest.raises(ModelFolderError, match=r"experts\.3\.up_proj\.weight has shape \[7, 64\]"):
        make_learner(rewrite(path, tmp_path, **changes))
