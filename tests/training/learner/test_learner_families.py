"""Model families with states, sinks, frozen tensors or biases: updates, weight syncs, exports,
resuming.

Log-probabilities and gradients of every family were compared once (docs/models.md).
"""

from pathlib import Path

import pytest
import torch
from learner_setup import (
    all_plain_logprobs,
    learner_logprobs,
    make_examples,
    make_learner,
    pack_minibatch,
    plain_adamw,
    plain_model,
    plain_update,
)
from safetensors.torch import load_file
from tiny_architectures import tiny_config, tiny_model

from april_rl.config.choices import ComputeDtype

FAMILIES = {
    "qwen3_next": "a gated delta net and experts",
    "nemotron_h": "Mamba, experts, and a frozen bias of the router",
    "olmo_hybrid": "one convolution here where checkpoints have three",
    "lfm2": "short convolutions",
    "gpt_oss": "sinks",
    "glm4_moe": "a frozen bias of the router",
    "phi": "a bias in the output layer",
}
# Families of which only the log-probabilities are compared.
OTHERS = {
    "mistral": "a window in every layer",
    "qwen2": "a window in some layers, and biases",
    "gemma3_text": "windows and full attention by turns, with a rotary base each",
    "olmo3": "norms of queries and keys, windows",
    "cohere2": "scaled logits, layers without rotary positions",
    "granitemoe": "divided logits, experts",
    "hyperclovax": "multiplied logits",
    "nanochat": "a soft cap",
    "phimoe": "a router that samples while it trains",
    "afmoe": "gated attention",
    "gemma2": "a soft cap in attention",
    "qwen3_5": "a gated delta net, in a multimodal model",
    "falcon_h1": "Mamba beside attention",
    "longcat_flash": "a frozen bias of the router",
}
VOCABULARY = 98  # the lengths of `make_examples`

pytestmark = [
    pytest.mark.usefixtures("_group"),
    pytest.mark.filterwarnings("ignore"),  # transformers warns about tiny configurations
]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(tiny_config(request.param, vocab_size=VOCABULARY)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model_type", OTHERS)
def test_log_probabilities_equal_the_ones_of_transformers(model_type, tmp_path):
    """Dropouts are on in the configuration, and windows are shorter than the sequences."""
    tiny_model(tiny_config(model_type, vocab_size=VOCABULARY)).save_pretrained(tmp_path)
    examples = make_examples(str(tmp_path), noise=0.3, age=1)
    learner = make_learner(str(tmp_path), activation_checkpointing=True)
    expected = all_plain_logprobs(plain_model(str(tmp_path)), examples)
    torch.testing.assert_close(learner_logprobs(learner, examples), expected, atol=1e-5, rtol=0)


def test_an_update_equals_plain_torch_one_sequence_at_a_time(path):
    examples = make_examples(path, noise=0.3, age=1)
    learner, model = make_learner(path, activation_checkpointing=True), plain_model(path)
    plain_update(model, plain_adamw(model), [examples])
    learner.update([pack_minibatch([examples[:4], examples[4:]])])
    expected = all_plain_logprobs(model, examples)
    torch.testing.assert_close(learner_logprobs(learner, examples), expected, atol=2e-4, rtol=1e-4)


def test_sent_weights_have_the_names_of_the_checkpoint_and_frozen_tensors_its_bits(path):
    """Fails when the engine does not get a tensor, or a router's bias is rounded or trained."""
    learner = make_learner(path, compute_dtype=ComputeDtype.bfloat16)
    learner.update([pack_minibatch([make_examples(path, noise=0.3, age=1)])])
    stored, sent = load_file(Path(path, "model.safetensors")), dict(learner.weights())
    assert sent.keys() == stored.keys()
    kept = {name for name in stored if torch.equal(sent[name], stored[name])}
    assert kept == {name for name in stored if name.endswith("e_score_correction_bias")}
    assert all(sent[name].dtype is torch.float32 for name in kept)


def test_an_export_loads_in_transformers_and_in_a_learner_that_continues(path, tmp_path):
    """So does a snapshot. Fails when the saved tensors are from another policy version."""
    examples = make_examples(path, noise=0.3, age=1)
    learner = make_learner(path)
    learner.update([pack_minibatch([examples])])
    learner.export(tmp_path / "export")
    learner.snapshot().write(tmp_path / "state")
    expected = learner_logprobs(learner, examples)
    exported = all_plain_logprobs(plain_model(str(tmp_path / "export")), examples)
    torch.testing.assert_close(exported, expected, atol=2e-5, rtol=1e-5)
    resumed = make_learner(path)
    resumed.load_state(tmp_path / "state")
    for each in (resumed, learner):
        each.update([pack_minibatch([examples])])
    # Not bit-identical: a sum over experts may round differently when memory is aligned
    # differently.
    torch.testing.assert_close(
        learner_logprobs(resumed, examples), learner_logprobs(learner, examples), atol=1e-6, rtol=0
    )
