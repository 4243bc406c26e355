"""The user's own loss; its result is checked at every call."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Loss
from april_rl.config.user_code import Caught, Hook, OwnFunctionError
from april_rl.training.algorithm.losses import LossFunction, LossInputs, TokenLoss
from april_rl.training.algorithm.responses import Responses

_METRIC_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)*", re.ASCII)  # it is logged as loss/own/NAME


def load_loss(config: AlgorithmConfig) -> LossFunction | None:
    """Return the function of algorithm.loss, None for a built-in one; raise OwnFunctionError."""
    if config.loss in Loss.__members__:
        return None
    hook = Hook("algorithm.loss", config.loss)
    loss = hook.load("inputs", args=config.args, key="algorithm.args", is_shared=True)

    def call(inputs: LossInputs) -> TokenLoss:
        if not len(inputs.logprobs):  # a rank may have a row without responses
            return TokenLoss(inputs.logprobs * 0, inputs.logprobs.new_zeros(0, dtype=torch.bool))
        returned = loss(_copy(inputs))
        if isinstance(returned, Tensor):
            returned = TokenLoss(returned, torch.zeros_like(returned, dtype=torch.bool))
        if not isinstance(returned, TokenLoss):
            raise TypeError(
                f"it returned a {type(returned).__name__}; return a tensor or a TokenLoss"
            )
        _check(returned, inputs)
        # A loss that is constant for these tokens has the gradient 0.
        return returned._replace(loss=returned.loss + 0 * inputs.logprobs)

    return lambda inputs: hook.call(partial(call, inputs))


def _copy(inputs: LossInputs) -> LossInputs:
    """Return inputs that the user's loss may change in place: weights, masks, metrics and the next
    pass over the batch need the originals.
    """
    return LossInputs(
        logprobs=inputs.logprobs.clone(),
        anchor_logprobs=inputs.anchor_logprobs.clone(),
        advantages=inputs.advantages.clone(),
        behaviour_logprobs=inputs.behaviour_logprobs.clone(),
        responses=Responses(inputs.responses.lengths.clone(), inputs.responses.index.clone()),
    )


def _check(returned: TokenLoss, inputs: LossInputs) -> None:
    """Raise TypeError unless every tensor has a finite value for each token, and every metric a
    name that can be logged.
    """
    tensors = {"loss": returned.loss, "clipped": returned.clipped}
    for name, metric in returned.metrics.items():
        if not _METRIC_NAME.fullmatch(str(name)):
            raise TypeError(
                f"it returned a metric named {name!r}; a name has letters, digits, _, - and . only"
            )
        tensors[f"the metric {name}"] = metric
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"it returned {name} as a {type(tensor).__name__}; it needs a tensor with "
                "one value for each token, [T]"
            )
        if tensor.shape != inputs.logprobs.shape:
            raise TypeError(
                f"it returned {name} of shape {list(tensor.shape)} "
                f"for {len(inputs.logprobs)} tokens; it needs one value for each token, [T]"
            )
    # One reduction for all tensors: on a GPU each one waits for the device.
    if torch.stack([*tensors.values()]).isfinite().all() or not _are_finite(inputs):
        return  # the learner reports a model that gives NaN
    for name, tensor in tensors.items():
        wrong = tensor[~tensor.isfinite()]
        if len(wrong):
            raise TypeError(
                f"it returned {name} with {len(wrong)} of {len(tensor)} values that are not "
                f"finite (the first is {wrong[0].item()}), from finite inputs; bound the "
                "denominators and the arguments of log and exp"
            )


def _are_finite(inputs: LossInputs) -> bool:
    given = (inputs.logprobs, inputs.anchor_logprobs, inputs.advantages, inputs.behaviour_logprobs)
    return bool(torch.stack(given).isfinite().all())


def try_loss(config: AlgorithmConfig) -> None:
    """Call the user's loss, if there is one, with two short responses of which one is wrong, both,
    or none, and with a single token. Raise OwnFunctionError when it fails, has no gradient for the
    first ones, or a gradient that is not finite.
    """
    loss = load_loss(config)
    if loss is None:
        return
    anchor = torch.tensor([-0.6, -0.9, -1.5, -0.3, -0.1])
    for first, second in ((1.0, -1.0), (1.0, 1.0), (-1.0, -1.0), (0.0, 0.0)):
        for lengths in ([3, 2], [1]):
            num_tokens = sum(lengths)
            logprobs = torch.tensor([-0.5, -1.0, -1.5, -0.2, -0.1])[:num_tokens].requires_grad_()
            inputs = LossInputs(
                logprobs=logprobs,
                anchor_logprobs=anchor[:num_tokens],
                advantages=torch.tensor([first] * 3 + [second] * 2)[:num_tokens],
                behaviour_logprobs=anchor[:num_tokens] - 0.05,
                responses=Responses.of(lengths),
            )
            message = _failure_of(
                loss, inputs, needs_gradient=num_tokens > 1 and first * second < 0
            )
            if message:
                tokens = "one token" if num_tokens == 1 else "five tokens"
                where = "" if first * second < 0 else f", all of advantage {first:g}"
                raise OwnFunctionError(
                    f"algorithm.loss={config.loss} failed when called with {tokens} as a test"
                    f"{where}: {message}"
                )


def _failure_of(loss: LossFunction, inputs: LossInputs, *, needs_gradient: bool) -> str:
    """Return why a loss or its gradient is wrong for these inputs; empty if nothing is."""
    try:
        found = loss(inputs).loss
    except OwnFunctionError as error:
        return str(error).partition(": ")[2]
    with Caught() as caught:
        [gradient] = torch.autograd.grad(found.sum(), inputs.logprobs)
        if not gradient.isfinite().all():
            return (
                f"the gradient of its loss is {gradient.tolist()}; it must be finite, also in the "
                "branch that torch.where leaves out"
            )
        if needs_gradient and not gradient.any():
            return "its loss has no gradient with respect to inputs.logprobs"
    return caught.message
