"""The user's own loss; its result is checked at every call."""

from __future__ import annotations

import torch
from torch import Tensor

from april_rl.algorithm.losses import LossFunction, LossInputs, TokenLoss
from april_rl.algorithm.responses import Responses
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Loss
from april_rl.outside.own_algorithm import OwnFunctionError, load_own
from april_rl.outside.user_code import Caught


def load_loss(config: AlgorithmConfig) -> LossFunction | None:
    """Return the function of algorithm.loss, None for a built-in one; raise OwnFunctionError."""
    if config.loss in Loss.__members__:
        return None
    loss = load_own(config, "loss", config.loss)

    def call_and_check(inputs: LossInputs) -> TokenLoss:
        returned = loss(inputs)
        if isinstance(returned, Tensor):
            returned = TokenLoss(returned, torch.zeros_like(returned, dtype=torch.bool))
        if not isinstance(returned, TokenLoss):
            raise OwnFunctionError(
                f"algorithm.loss={config.loss} returned a {type(returned).__name__}; return a "
                "tensor or a TokenLoss"
            )
        _check(returned, inputs, setting=f"algorithm.loss={config.loss}")
        return returned

    return call_and_check


def _check(returned: TokenLoss, inputs: LossInputs, *, setting: str) -> None:
    """Raise OwnFunctionError unless every tensor has a finite value for each token."""
    tensors = {"loss": returned.loss, "clipped": returned.clipped}
    tensors |= {f"the metric {name}": metric for name, metric in returned.metrics.items()}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise OwnFunctionError(
                f"{setting} returned {name} as a {type(tensor).__name__}; it needs a tensor with "
                "one value for each token, [T]"
            )
        if tensor.shape != inputs.logprobs.shape:
            raise OwnFunctionError(
                f"{setting} returned {name} of shape {list(tensor.shape)} "
                f"for {len(inputs.logprobs)} tokens; it needs one value for each token, [T]"
            )
    # One reduction for all tensors: on a GPU each one waits for the device.
    if torch.stack([*tensors.values()]).isfinite().all() or not _are_finite(inputs):
        return  # the learner reports a model that gives NaN
    for name, tensor in tensors.items():
        wrong = tensor[~tensor.isfinite()]
        if len(wrong):
            raise OwnFunctionError(
                f"{setting} returned {name} with {len(wrong)} of {len(tensor)} values that are not "
                f"finite (the first is {wrong[0].item()}), from finite inputs; bound the "
                "denominators and the arguments of log and exp"
            )


def _are_finite(inputs: LossInputs) -> bool:
    given = (inputs.logprobs, inputs.anchor_logprobs, inputs.advantages, inputs.behaviour_logprobs)
    return bool(torch.stack(given).isfinite().all())


def try_loss(config: AlgorithmConfig) -> None:
    """Call the user's loss, if there is one, with two short responses. Raise OwnFunctionError when
    it fails, or no finite gradient reaches the log-probabilities.
    """
    loss = load_loss(config)
    if loss is None:
        return
    logprobs = torch.tensor([-0.5, -1.0, -1.5, -0.2, -0.1], requires_grad=True)
    anchor = torch.tensor([-0.6, -0.9, -1.5, -0.3, -0.1])
    inputs = LossInputs(
        logprobs=logprobs,
        anchor_logprobs=anchor,
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        behaviour_logprobs=anchor - 0.05,
        responses=Responses.of([3, 2]),
    )
    with Caught() as caught:
        caught.message = _wrong_gradient(loss(inputs).loss, logprobs)
    if caught.message:
        raise OwnFunctionError(
            f"algorithm.loss={config.loss} failed when called with five tokens as a test: "
            f"{caught.message}"
        )


def _wrong_gradient(loss: Tensor, logprobs: Tensor) -> str:
    """Return what is wrong with the gradient of a loss; empty if nothing is."""
    if not loss.requires_grad:
        return "its loss has no gradient"
    [gradient] = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)
    if gradient is None:
        return "its loss has no gradient with respect to inputs.logprobs"
    if not gradient.isfinite().all():
        return (
            f"the gradient of its loss is {gradient.tolist()}; it must be finite, also in the "
            "branch that torch.where leaves out"
        )
    return ""
