"""Checks and adjustments of a model's architecture, made before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast

from april_rl.errors import RunError
from april_rl.training.learner.model import attention
from april_rl.training.learner.model.logprobs import LogitShape
from april_rl.training.learner.model.mixers import has_known_mixers, separate_sequences
from april_rl.training.learner.model.sizes import recomputed_layers

# In messages, this stands between a model's name and the reason.
NOT_SUPPORTED = " is not supported (docs/models.md lists supported types): "
_NOISE = "drop"  # part of every dropout setting's name: attention_dropout, resid_pdrop, layerdrop

# Layer types that mix tokens only in attention.packed_attention. Other types select tokens by index
# or chunk, or carry a state from token to token, which is supported for known mixers only.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Unsupported models that no check of their configuration or parameters can recognise.
_OWN_ATTENTION = {
    "doge": "its attention selects tokens with its own mask",
    "moshi": "it does not pass the sample boundaries of a packed row to its attention",
    "nemotron": "it does not pass the sample boundaries of a packed row to its attention",
}
# Models that apply a sliding window only through their attention mask.
_WINDOW_IN_MASK = ("phimoe", "qwen2_moe")

# Errors a model's code may raise when it gets one number per token instead of a hidden state.
_CODE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_SMALL, _LARGE = 2.0**-13, 1e6  # a soft cap keeps the first product and bounds the second


class _BackboneOutput(MoeModelOutputWithPast):
    """Backbone output on which every field that a model may read exists; absent fields are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class UnsupportedModelError(RunError):
    """The model in model.path has a part that the learner would compute differently."""


def silence(config: PreTrainedConfig) -> None:
    """Set every dropout of a model's configuration to 0, in place.

    Dropout noise would make importance ratios meaningless. Router noise needs no setting here:
    `recompute_activations` leaves routers in evaluation mode, and router_jitter_noise in
    Phi-3.5-MoE is a threshold, not noise.
    """
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            silence(value)
        elif _NOISE in key and type(value) in (int, float):
            setattr(config, key, type(value)(0))


def recompute_activations(module: nn.Module, *, share: float = 1.0) -> None:
    """Make a share of the layers of a model in evaluation mode, spread evenly, recompute their
    activations in the backward pass.

    transformers recomputes only in layers whose `training` flag is set. Setting the flag on the
    layer alone keeps its submodules in evaluation mode, such as a router that samples experts in
    training.
    """
    layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
    for index in recomputed_layers(share, num_layers=len(layers)):
        layers[index].training = True


def _objections(causal_lm: PreTrainedModel) -> Iterator[str]:
    """Yield the reasons why a model is not supported, each completing NOT_SUPPORTED."""
    config = causal_lm.config
    text = config.get_text_config().to_dict()
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    if config.model_type in _OWN_ATTENTION:
        yield _OWN_ATTENTION[config.model_type]
    others = sorted(set(text.get("layer_types") or ()) - _LAYER_TYPES)
    if (causal_lm._is_stateful or others) and not has_known_mixers(causal_lm):
        means = ", ".join(others) or "recurrent state"
        yield (
            f"it mixes tokens by other means than causal attention ({means}), so the samples of a "
            "packed row would see each other"
        )
    if not (causal_lm._supports_attention_backend or has_known_mixers(causal_lm)):
        yield "its attention cannot be replaced by the one that separates samples in a packed row"
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):  # vision: in images
        yield "its attention is not causal (use_bidirectional_attention)"
    window = text.get("sliding_window") or 0
    if config.model_type in _WINDOW_IN_MASK and 0 < window < text["max_position_embeddings"]:
        yield (
            f"it applies its sliding window (sliding_window={window}) only through an attention "
            "mask, and packed attention takes no mask"
        )
    parts = dict(causal_lm.named_children())
    head = parts.get("lm_head")
    if "model" not in parts or not isinstance(head, nn.Linear):
        yield "it does not consist of a backbone `model` and a linear output layer `lm_head`"


def frozen_tensors(causal_lm: PreTrainedModel) -> list[str]:
    """Return the names of the buffers that checkpoints have: they are loaded and never trained.

    One is the bias by which the routers of DeepSeek-V3 choose experts. Its published recipe
    updates the bias from the experts' load; here it stays as it is.
    """
    parameters = dict(causal_lm.named_parameters(remove_duplicate=False))
    return sorted(set(causal_lm.state_dict()) - set(parameters))


def check_device(causal_lm: PreTrainedModel, device: torch.device) -> None:
    """Raise UnsupportedModelError if the attention of this model is only computed on CPUs."""
    text = causal_lm.config.get_text_config().to_dict()
    cap = text.get("attn_logit_softcapping")
    has_sinks = any(name.endswith("sinks") for name, _ in causal_lm.named_parameters())
    if device.type != "cpu" and (cap or has_sinks):
        part = "sinks" if has_sinks else f"a soft cap (attn_logit_softcapping={cap:g})"
        raise UnsupportedModelError(
            f"model.path: model_type {causal_lm.config.model_type} is supported on CPUs only: its "
            f"attention has {part}, for which the packed attention of GPUs has no gradient"
        )


def logit_shape(causal_lm: PreTrainedModel) -> LogitShape:
    """Measure how a model transforms the products x of its hidden states and its output weights.

    Runs the model's own code on probe values, so that no setting has to be known by name: Granite
    divides logits by logits_scaling, HyperCLOVA X multiplies by it.

    Raises UnsupportedModelError when the transformation is neither a scale nor a soft cap.
    """
    probes = torch.tensor([_SMALL, 0.3, 1.0, 4.0, 30.0, 300.0, _LARGE], dtype=torch.float64)
    products = torch.cat([probes, -probes])
    try:
        logits = _logits_of(causal_lm, products).double()
        scale, highest = logits[0].item() / _SMALL, logits[len(probes) - 1].item()
        is_bounded = abs(highest) < 0.5 * abs(scale) * _LARGE
        shape = LogitShape(scale=scale, cap=highest if is_bounded else None)
        torch.testing.assert_close(logits, shape.of(products.clone()), rtol=1e-5, atol=1e-8)
    except (*_CODE_ERRORS, AssertionError) as error:
        raise UnsupportedModelError(
            f"model.path: model_type {causal_lm.config.model_type}{NOT_SUPPORTED}it transforms its "
            f"logits by more than a scale or a soft cap ({type(error).__name__})"
        ) from error
    return shape


def empty_model(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build a configuration's model with packed attention, no dropout and empty parameters.

    For a multimodal configuration this is its text model. Raises UnsupportedModelError when the
    learner cannot compute this model exactly.
    """
    attention.register()
    text: PreTrainedConfig = config.get_text_config()
    if text is not config:  # whether its output layer is tied stands in the whole model's config
        text.tie_word_embeddings = config.tie_word_embeddings
    silence(text)
    try:
        with init_empty_weights(include_buffers=False):
            causal_lm: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                text, dtype=dtype, attn_implementation=attention.NAME
            )
    except (ImportError, KeyError, ValueError) as error:
        raise UnsupportedModelError(
            f"model.path: model_type {text.model_type}{NOT_SUPPORTED}transformers cannot build "
            f"it as a causal language model with packed attention ({type(error).__name__})"
        ) from error
    reason = next(_objections(causal_lm), None)
    if reason is not None:
        raise UnsupportedModelError(
            f"model.path: model_type {causal_lm.config.model_type}{NOT_SUPPORTED}{reason}"
        )
    separate_sequences(layers_of(causal_lm))
    for name in frozen_tensors(causal_lm):
        buffer = causal_lm.get_buffer(name)
        if buffer.is_floating_point():  # as published, also where parameters are bfloat16
            buffer.data = buffer.float()
    return causal_lm


def layers_of(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model: the modules that transformers marks as not to be split."""
    kinds = causal_lm._no_split_modules or ()
    return [module for module in causal_lm.modules() if type(module).__name__ in kinds]


def _logits_of(causal_lm: PreTrainedModel, products: Tensor) -> Tensor:
    """Return the logits [P] that the model's code computes from the products [P] of one token."""
    backbone = causal_lm.base_model
    output = _BackboneOutput(last_hidden_state=products[None, None])  # type: ignore[arg-type]
    token = torch.zeros(1, 1, dtype=torch.int64)
    with (
        _replace_forward(backbone, lambda *_, **__: output),
        _replace_forward(causal_lm.get_decoder(), lambda *_, **__: output),  # type: ignore[no-untyped-call]
        _replace_forward(causal_lm.get_output_embeddings(), lambda hidden: hidden),  # type: ignore[no-untyped-call]
    ):
        logits: Tensor = causal_lm(input_ids=token, use_cache=False).logits
    return logits.reshape(products.shape)


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Replace a module's forward function inside a `with` block."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
