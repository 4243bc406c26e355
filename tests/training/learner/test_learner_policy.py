"""The sharded policy and its checkpoints, in a world of one rank."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from learner_setup import (
    CPU,
    PRECISIONS,
    build_policy,
    check_gradients,
    learner_logprobs,
    make_examples,
    make_learner,
    pack,
    pack_minibatch,
    rewrite,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from april_rl.config.choices import ComputeDtype
from april_rl.run.checkpointing.exports import exported_files, other_files
from april_rl.training.learner.model.checkpoint import ModelFolderError
from april_rl.training.learner.model.export import plan_shards
from april_rl.training.learner.row import PackedRow

pytestmark = pytest.mark.usefixtures("_group")


def test_a_packed_row_gives_the_gradients_of_its_sequences_one_by_one(either_path):
    check_gradients(build_policy(either_path), either_path)


@pytest.mark.parametrize(
    ("share", "recomputed"), [(0.0, []), (0.3, [0]), (0.5, [0, 2]), (1.0, [0, 1, 2])]
)
def test_a_share_of_the_layers_is_recomputed_and_gradients_are_the_same(
    either_path, share, recomputed
):
    """Fails when the wrong number of layers is recomputed, or one of them differently."""
    examples = make_examples(either_path, noise=0.0, age=0)
    row = PackedRow.of(pack(examples, total=1), device=CPU)
    gradients, passes = [], []
    for chosen in (0.0, share):
        policy = build_policy(either_path, activation_checkpointing=chosen)
        for number, layer in enumerate(policy.model.layers):
            attention = layer.self_attn
            attention.register_forward_hook(lambda *_, number=number: passes.append(number))
        passes.clear()
        (policy(row)[0] * row.credits).sum().backward()
        gradients.append({name: p.grad.full_tensor() for name, p in policy.named_parameters()})
    assert sorted(passes) == sorted([0, 1, 2, *recomputed])
    plain, found = gradients
    for name, grad in found.items():
        assert (grad - plain[name]).norm() <= 1e-6 * plain[name].norm(), name


def test_weights_equal_the_checkpoint_even_after_a_forward_pass(either_path):
    learner = make_learner(either_path, compute_dtype=ComputeDtype.bfloat16)
    learner_logprobs(learner, make_examples(either_path, noise=0.0, age=0))
    stored = load_file(Path(either_path, "model.safetensors"))
    sent = dict(learner.weights())
    assert sent.keys() == stored.keys()
    for name, tensor in sent.items():
        assert type(tensor) is torch.Tensor, name
        assert tensor.dtype is torch.bfloat16, name
        assert torch.equal(tensor, stored[name]), name


def test_master_weights_stay_float32_when_compute_is_bfloat16(path):
    learner = make_learner(path, compute_dtype=ComputeDtype.bfloat16, lr=1e-7, max_mismatch=1.0)
    before = dict(learner.weights())
    for _ in range(2):
        learner.update([pack_minibatch([make_examples(path, noise=0.01, age=0)])])
    after = {name: p.full_tensor() for name, p in learner._policy.named_parameters()}
    assert all(tensor.dtype is torch.float32 for tensor in after.values())
    assert all(not torch.equal(after[name], before[name].float()) for name in before)
    assert any(torch.equal(after[name].bfloat16(), before[name]) for name in before)


def test_a_float32_learner_sends_its_master_weights_bit_by_bit(path):
    """If they were rounded on the way, small updates would never reach a float32 engine."""
    learner = make_learner(path, lr=1e-7)
    before = dict(learner.weights())
    learner.update([pack_minibatch([make_examples(path, noise=0.0, age=0)])])
    masters = {name: p.full_tensor() for name, p in learner._policy.named_parameters()}
    sent = dict(learner.weights())
    assert all(torch.equal(sent[name], masters[name]) for name in sent)
    assert all(not torch.equal(sent[name], before[name]) for name in sent)


@pytest.mark.parametrize("compute_dtype", PRECISIONS)
def test_transformers_loads_an_exported_policy_as_the_same_model(
    either_path, tmp_path, compute_dtype
):
    learner = make_learner(either_path, compute_dtype=compute_dtype)
    examples = make_examples(either_path, noise=0.0, age=0)
    learner.update([pack_minibatch([examples])])
    learner.export(tmp_path / "step_1")
    sent = dict(learner.weights())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")
    assert model.dtype is getattr(torch, compute_dtype.value)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, sent[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step_1")
    assert tokenizer("1+2").input_ids == AutoTokenizer.from_pretrained(either_path)("1+2").input_ids
    assert (tmp_path / "step_1" / "generation_config.json").exists()
    again = make_learner(str(tmp_path / "step_1"), compute_dtype=compute_dtype)
    assert torch.equal(learner_logprobs(again, examples), learner_logprobs(learner, examples))


def test_an_export_replaces_an_earlier_one_completely(path, tmp_path):
    """Fails when files of the earlier one remain, or its folder remains under another name."""
    target = tmp_path / "step_2"
    target.mkdir()
    (target / "model-00001-of-00002.safetensors").write_text("of an earlier life")
    make_learner(path).export(target)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert not (target / "model-00001-of-00002.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(target)


def test_an_export_has_the_tokenizers_named_templates_and_no_index_of_other_weights(path, tmp_path):
    """Fails when an export loses what AutoTokenizer reads, or names files that it does not have."""
    source = shutil.copytree(path, tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    for name in ("pytorch_model.bin.index.json", "model.safetensors.index.fp16.json"):
        (source / name).write_text('{"weight_map": {}}')
    target = tmp_path / "step_1"
    make_learner(str(source)).export(target)
    again = AutoTokenizer.from_pretrained(target)
    assert again.chat_template == tokenizer.chat_template
    assert list(target.glob("*.index*")) == []
    assert "additional_chat_templates/tool_use.jinja" in exported_files(target)
    assert other_files(target) == []


def test_files_of_an_export_stay_below_their_size_unless_one_tensor_is_larger():
    assert plan_shards([4, 4, 9, 1, 1, 7], max_bytes=8) == [0, 0, 1, 2, 2, 3]


def test_missing_and_unknown_tensors_are_named(either_path, tmp_path):
    changes = {"model.norm.weight": None, "model.norm.scale": torch.ones(3)}
    with pytest.raises(
        ModelFolderError, match=r"model\.norm\.weight\) missing.*norm\.scale\) unkn"
    ):
        make_learner(rewrite(either_path, tmp_path, **changes))


def test_an_output_layer_that_a_tied_model_would_ignore_is_refused(path, tmp_path):
    """An equal one is what some tools write. Fails when one of two different tensors is used for
    both, or the equal one is refused.
    """
    name = "lm_head.weight"
    embedding = load_file(Path(path, "model.safetensors"))["model.embed_tokens.weight"]
    make_learner(rewrite(path, tmp_path, **{name: embedding.clone()}))
    for other in (embedding + 0.1, embedding[1:].clone()):
        with pytest.raises(ModelFolderError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
            make_learner(rewrite(path, tmp_path, **{name: other}))


def test_a_tensor_with_the_wrong_shape_is_named(path, tmp_path):
    changes = {"model.norm.weight": torch.ones(3)}
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight has shape \[3\]"):
        make_learner(rewrite(path, tmp_path, **changes))


def test_rope_frequencies_of_an_older_checkpoint_are_ignored(path, tmp_path):
    """The model computes them. Fails when they are refused as unknown."""
    changes = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    weights = dict(make_learner(rewrite(path, tmp_path, **changes)).weights())
    assert weights.keys() == load_file(Path(path, "model.safetensors")).keys()


def in_files(path: str, target: Path) -> list[Path]:
    """Write the checkpoint in several files with an index."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(target, max_shard_size="100KB")
    return sorted(target.glob("*.safetensors"))


def test_missing_files_of_an_index_are_named(path, tmp_path):
    first, *others = in_files(path, tmp_path)
    first.unlink()
    with pytest.raises(ModelFolderError, match=rf"are missing: 1 \({first.name}\)"):
        make_learner(str(tmp_path))
    for other in others:
        other.unlink()
    with pytest.raises(ModelFolderError, match=rf"are missing: {1 + len(others)} \({first.name}, "):
        make_learner(str(tmp_path))


def test_a_truncated_file_is_named(path, tmp_path):
    """An interrupted download leaves such a file. Fails when the user sees safetensors'
    own error.
    """
    last = in_files(path, tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:-7])
    with pytest.raises(ModelFolderError, match=rf"model\.path=.*: {last.name} cannot be read"):
        make_learner(str(tmp_path))
    (tmp_path / "single").mkdir()
    single = Path(rewrite(path, tmp_path / "single"), "model.safetensors")
    single.write_bytes(single.read_bytes()[:100])
    with pytest.raises(ModelFolderError, match=r": model\.safetensors cannot be read"):
        make_learner(str(single.parent))


@pytest.mark.parametrize("text", ["{", "{}"])
def test_an_index_file_with_other_contents_is_named(path, tmp_path, text):
    in_files(path, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors\.index\.json cannot be read"):
        make_learner(str(tmp_path))


def test_a_tensor_missing_from_its_file_gives_an_error_that_names_both(path, tmp_path):
    first, last = (in_files(path, tmp_path)[i].name for i in (0, -1))
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(name for name, of in index["weight_map"].items() if of == first)
    index["weight_map"][name] = last
    file.write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match=rf"{last} cannot be read .*{name}"):
        make_learner(str(tmp_path))


def test_a_folder_without_safetensors_is_refused(path, tmp_path):
    (tmp_path / "config.json").write_text(Path(path, "config.json").read_text())
    with pytest.raises(ModelFolderError, match=r"neither model\.safetensors nor"):
        make_learner(str(tmp_path))


def test_a_path_without_a_model_is_refused_by_its_key():
    with pytest.raises(ModelFolderError, match=r"model\.path=no/such/folder is neither"):
        make_learner("no/such/folder")
