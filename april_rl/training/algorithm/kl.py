"""Terms that are added to the policy loss of a token: how far the policy is from a frozen
reference, by two of Schulman's estimators, and an entropy bonus.

Legend: [T] trained tokens; logprobs and reference_logprobs in nats, of the sampled token, at the
sampling temperature. π is the policy, ρ the reference, KL(π‖ρ) the divergence per token. Source:
Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). His k1, log π - log
ρ, cannot be a term of a loss: its gradient has expectation zero. It is used in the reward instead
(`k1_to_go`).

The value of an estimator and its gradient estimate different things: a term of the loss is
differentiated, which does not commute with an expectation over samples of π. What the docstrings
say about both holds for tokens sampled by π; older tokens need the same importance weight as in the
policy loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from april_rl.config.choices import Kl
from april_rl.training.algorithm.ratio import clamp
from april_rl.training.algorithm.responses import Responses

# Maps log-probabilities of the policy and the reference [T] to a term of the loss [T].
Estimator = Callable[[Tensor, Tensor], Tensor]


def estimator(chosen: Kl) -> Estimator | None:
    """Return the estimator of algorithm.kl, or None if there is no such term."""
    match chosen:
        case Kl.none | Kl.k1:
            return None
        case Kl.k2:
            return k2
        case Kl.k3:
            return k3


def k1_to_go(logprobs: Tensor, reference_logprobs: Tensor, responses: Responses) -> Tensor:
    """Σ (log π - log ρ) over a token and the rest of its response [T].

    Subtracted from the advantages, times a coefficient, it gives the policy gradient of the reward
    minus coefficient · KL(π‖ρ) of whole responses. This is KL in the reward, as in Ouyang et al.
    2022 (InstructGPT) and Hu et al. 2025 (REINFORCE++), with a discount of 1; baselines and
    standard deviations of rewards do not include it. It has no gradient.
    """
    return responses.to_go((logprobs - reference_logprobs).detach())


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """½ (log π - log ρ)² [T]: biased for KL(π‖ρ), low variance, never negative.

    Its gradient (log π - log ρ) ∇log π is an unbiased estimate of ∇KL(π‖ρ): use it in a loss.
    """
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """ρ/π - 1 - log(ρ/π) [T]: unbiased for KL(π‖ρ), low variance, never negative.

    Use it for logging; it is also GRPO's term (Shao et al. 2024, eq. 4). Its gradient (1 - ρ/π)
    ∇log π is an unbiased estimate of the gradient of the other direction, KL(ρ‖π); near ρ = π the
    two agree to first order. A token that is 20 nats or more below the reference gets no gradient
    here, but does with `k2`.
    """
    log_ratio = clamp(reference_logprobs - logprobs)
    return torch.expm1(log_ratio) - log_ratio


def sampled_negative_entropy(logprobs: Tensor) -> Tensor:
    """½ (log π)² [T] of the sampled token: its gradient is an unbiased estimate of the gradient of
    -H, its value does not estimate -H.

    ∇(-H) = E[(log π + 1) ∇log π] over tokens of π, and E[∇log π] = 0. It equals `k2` against a
    uniform reference, up to a constant in the factor. It needs only the log-probability; tokens of
    an older policy need their importance weight.
    """
    return logprobs.square() / 2
