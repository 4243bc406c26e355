"""A text model inside a multimodal one, and checkpoint tensors that no model here has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learner_setup import (
    learner_logprobs,
    make_examples,
    make_learner,
    pack_minibatch,
    plain_adamw,
    plain_logprobs,
    plain_update,
)
from safetensors.torch import load_file, save_file
from tiny_architectures import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from april_rl.config.choices import ComputeDtype
from april_rl.config.lora import LoraConfig
from april_rl.start.planning.model import read_model
from april_rl.training.learner.model.checkpoint import ModelFolderError
from april_rl.training.learner.model.model_sizes import model_sizes

FILE = "model.safetensors"
VOCABULARY = 98  # the lengths of `make_examples`
MTP = "mtp.layers.0.mlp.down_proj.weight"  # from a layer for multi-token prediction

pytestmark = [
    pytest.mark.usefixtures("_group"),
    pytest.mark.filterwarnings("ignore"),  # transformers warns about tiny configurations
]


def published_name(name: str) -> str:
    """Return the tensor name that Gemma 3 has on the hub."""
    name = name.replace("model.language_model.", "language_model.model.")
    return name.replace("model.vision_tower.", "vision_tower.")


def rename_tensors(file: Path, new: Callable[[str], str]) -> None:
    save_file({new(n): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})


def gemma3(folder: Path) -> None:
    tiny_model(tiny_config("gemma3", vocab_size=VOCABULARY)).save_pretrained(folder)


def published_gemma3(folder: Path) -> None:
    gemma3(folder)
    rename_tensors(folder / FILE, published_name)


def qwen3_5(folder: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config("qwen3_5", vocab_size=VOCABULARY)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / FILE) | {MTP: torch.randn(3, 4)}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=[gemma3, published_gemma3, qwen3_5])
def path(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    return str(folder)


def text_names(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {n for n in tensors if "language_model" in n or n.startswith("lm_head")}


def whole_model(path: str):
    """Return the multimodal model, of which the learner builds only the text model."""
    kind = AutoModelForImageTextToText
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def test_the_text_model_is_trained_as_in_plain_torch_and_exported_with_the_others(path, tmp_path):
    """The export loads as the multimodal model. Fails when an encoder is lost, changed or trained,
    or the text model's tensors have names that are not in model.path.
    """
    examples = make_examples(path, noise=0.3, age=1)
    learner, model = make_learner(path), whole_model(path)
    plain_update(model, plain_adamw(model), [examples])
    learner.update([pack_minibatch([examples])])
    learner.export(tmp_path / "export")
    stored, exported = load_file(Path(path, FILE)), load_file(tmp_path / "export" / FILE)
    assert exported.keys() == stored.keys()
    sent = dict(learner.weights())
    assert sent.keys() == text_names(stored)
    for name, tensor in stored.items():
        same = torch.equal(exported[name], tensor)
        assert same if name not in sent else torch.equal(exported[name], sent[name]), name
    assert AutoConfig.from_pretrained(tmp_path / "export").model_type in ("gemma3", "qwen3_5")
    for each in (model, whole_model(str(tmp_path / "export"))):
        with torch.no_grad():
            expected = torch.cat([plain_logprobs(each, example) for example in examples])
        found = learner_logprobs(learner, examples)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_encoders_are_not_in_the_memory_plan(path):
    sent = dict(make_learner(path, compute_dtype=ComputeDtype.float32).weights())
    assert model_sizes(read_model(path), LoraConfig()).num_parameters == sum(
        t.numel() for t in sent.values()
    )


def test_a_tensor_that_belongs_to_no_module_is_refused(tmp_path):
    """The model is not part of a multimodal one, and the tensor is not from a layer for multi-token
    prediction.
    """
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE) | {"vision_tower.weight": torch.ones(2)}
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelFolderError, match=r"1 \(vision_tower\.weight\) unknown"):
        make_learner(str(tmp_path))
