"""What a model's architecture does beside its matrices, settled before any weight is loaded."""

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
from april_rl.learner import attention
from april_rl.learner.logprobs import LogitShape

_NOISE = "drop"  # in the names of all such settings: attention_dropout, resid_pdrop, layerdrop

# Layers that meet in attention.packed_attention alone. Others select tokens by an index or a chunk,
# or carry a state from token to token.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Models whose code shows this in no other way.
_OWN_ATTENTION = {
    "doge": "its attention chooses tokens by a mask of its own",
    "moshi": "its attention is not told which tokens are one sample",
    "nemotron": "its attention is not told which tokens are one sample",
}
_WINDOW_IN_MASK = ("phimoe", "qwen2_moe")

# What a model's code may raise when it is given one number a token instead of a hidden state.
_CODE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_SMALL, _LARGE = 2.0**-13, 1e6  # products that a soft cap leaves alone, and does not


class _BackboneOutput(MoeModelOutputWithPast):
    """What a backbone returns, whatever more a model may ask of it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class UnsupportedModelError(RunError):
    """The learner would compute something else than the model in model.path does."""


def silence(config: PreTrainedConfig) -> None:
    """Set every dropout of a model's configuration to 0, in place.

    A log-probability with noise makes no importance ratio. The noise of routers needs no setting:
    `recompute_activations` leaves them in evaluation mode, and the router_jitter_noise of
    Phi-3.5-MoE is no noise but a threshold.
    """
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            silence(value)
        elif _NOISE in key and type(value) in (int, float):
            setattr(config, key, type(value)(0))


def recompute_activations(module: nn.Module) -> None:
    """Have each layer of a model in evaluation mode compute its activations anew in the backward
    pass.

    transformers does so in training mode only, and asks the layer: what is in it, as a router that
    samples its experts while it trains, stays in evaluation mode.
    """
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def _check(causal_lm: PreTrainedModel) -> None:
    """Raise UnsupportedModelError, naming what it is, when packed attention and an output layer of
    log-probabilities cannot stand for the model's own. Its parameters may be on the meta device.
    """
    reason = next(_objections(causal_lm), None)
    if reason is not None:
        raise UnsupportedModelError(
            f"model.path: model_type {causal_lm.config.model_type} is not supported: {reason}"
        )


def _objections(causal_lm: PreTrainedModel) -> Iterator[str]:
    """What the learner cannot do, in words that complete "not supported: "."""
    config = causal_lm.config
    text = config.get_text_config().to_dict()
    if config.is_encoder_decoder:
        yield "it is an encoder and a decoder"
    if config.get_text_config() is not config:
        yield "it is multimodal"
    if config.model_type in _OWN_ATTENTION:
        yield _OWN_ATTENTION[config.model_type]
    others = sorted(set(text.get("layer_types") or ()) - _LAYER_TYPES)
    if causal_lm._is_stateful or others:
        means = ", ".join(others) or "a state"
        yield (
            f"it mixes tokens by more than causal attention ({means}): the samples of a packed row "
            "would see each other"
        )
    if not causal_lm._supports_attention_backend:
        yield "its attention cannot be replaced by one that keeps the samples of a packed row apart"
    if text.get("attn_logit_softcapping"):
        cap = text["attn_logit_softcapping"]
        yield f"its attention has a soft cap (attn_logit_softcapping={cap:g})"
    if any(name.endswith("sinks") for name, _ in causal_lm.named_parameters()):
        yield "its attention has sinks"
    if text.get("use_bidirectional_attention"):
        yield "its attention looks ahead (use_bidirectional_attention)"
    window = text.get("sliding_window") or 0
    if config.model_type in _WINDOW_IN_MASK and 0 < window < text["max_position_embeddings"]:
        yield f"its window (sliding_window={window}) is in its mask alone"
    yield from _objections_to_names(causal_lm)


def _objections_to_names(causal_lm: PreTrainedModel) -> Iterator[str]:
    """What the parts of the model are called, and what a checkpoint has beside parameters."""
    parts = dict(causal_lm.named_children())
    head = parts.get("lm_head")
    if "model" not in parts or not isinstance(head, nn.Linear):
        yield "its parts are not a backbone `model` and a linear output layer `lm_head`"
    elif head.bias is not None:
        yield "its output layer has a bias"
    parameters = dict(causal_lm.named_parameters(remove_duplicate=False))
    stored = sorted(set(causal_lm.state_dict()) - set(parameters))
    if stored:
        yield f"its checkpoints have tensors that are not trained, as {stored[0]}"


def logit_shape(causal_lm: PreTrainedModel) -> LogitShape:
    """Measure what a model makes of the products x of its hidden states and its output weights.

    Its own code is given numbers in their place, so that no setting has to be known by name:
    Granite divides by logits_scaling, HyperCLOVA X multiplies by it.
    Raises UnsupportedModelError when it is neither a scale nor a soft cap.
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
            f"model.path: model_type {causal_lm.config.model_type} is not supported: what it makes "
            f"of its logits is neither a scale nor a soft cap ({type(error).__name__})"
        ) from error
    return shape


def empty_model(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a configuration with packed attention, without noise and without memory
    for its parameters.

    Raises UnsupportedModelError when it is none that the learner computes as it is meant.
    """
    attention.register()
    silence(config)
    try:
        with init_empty_weights(include_buffers=False):
            causal_lm: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=attention.NAME
            )
    except (ImportError, KeyError, ValueError) as error:
        raise UnsupportedModelError(
            f"model.path: model_type {config.model_type} is not supported: transformers cannot "
            f"build it as a causal language model with packed attention ({type(error).__name__})"
        ) from error
    _check(causal_lm)
    return causal_lm


def _logits_of(causal_lm: PreTrainedModel, products: Tensor) -> Tensor:
    """What the model's code returns [P] when its output layer gives the products [P] of a token."""
    backbone = causal_lm.base_model
    answer = _BackboneOutput(last_hidden_state=products[None, None])  # type: ignore[arg-type]
    token = torch.zeros(1, 1, dtype=torch.int64)
    with (
        _answering(backbone, lambda *_, **__: answer),
        _answering(causal_lm.get_decoder(), lambda *_, **__: answer),  # type: ignore[no-untyped-call]
        _answering(causal_lm.get_output_embeddings(), lambda hidden: hidden),  # type: ignore[no-untyped-call]
    ):
        logits: Tensor = causal_lm(input_ids=token, use_cache=False).logits
    return logits.reshape(products.shape)


@contextmanager
def _answering(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Have a module compute `forward` while it lasts."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
