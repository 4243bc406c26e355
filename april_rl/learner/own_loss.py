"""A loss of the user's, with its result checked at every call."""

from __future__ import annotations

import torch

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
    loss = load_own(config, "loss", config.loss, num_given=1)

    def checked(inputs: LossInputs) -> TokenLoss:
        returned = loss(inputs)
        if isinstance(returned, torch.Tensor):
            returned = TokenLoss(returned, torch.zeros_like(returned, dtype=torch.bool))
        if not isinstance(returned, TokenLoss):
            raise OwnFunctionError(
                f"algorithm.loss={config.loss} returned a {type(returned).__name__}; return a "
                "tensor or a TokenLoss"
            )
        parts = {"loss": returned.loss, "clipped": returned.clipped, **returned.metrics}
        for name, tensor in parts.items():
            if tensor.shape != inputs.logprobs.shape:
                raise OwnFunctionError(
                    f"algorithm.loss={config.loss} returned {name} of shape {list(tensor.shape)} "
                    f"for {len(inputs.logprobs)} tokens; it needs one value for each token, [T]"
                )
        return returned

    return checked


def try_loss(config: AlgorithmConfig) -> None:
    """Call the user's loss, if there is one, with two short responses. Raise OwnFunctionError when
    it fails, or its gradient does not reach the log-probabilities.
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
        has_gradient = loss(inputs).loss.requires_grad
        caught.message = "" if has_gradient else "its loss has no gradient"
    if caught.message:
        raise OwnFunctionError(
            f"algorithm.loss={config.loss} failed when called with five tokens as a test: "
            f"{caught.message}"
        )
