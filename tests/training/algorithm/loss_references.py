"""Independent policy losses, written token by token from the papers, in plain Python numbers.

Nothing comes from the package, and nothing is vectorised. `held` are the log-probabilities behind a
stopped gradient: a finite difference changes `logprobs` but not `held`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Response(NamedTuple):
    """A response; every field is [tokens]."""

    logprobs: list[float]
    held: list[float]
    anchor: list[float]
    advantages: list[float]


TokenReference = Callable[[Response], list[float]]


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def geometric_mean_ratio(logprobs: Sequence[float], anchor: Sequence[float]) -> float:
    """Return (π(y) / π_old(y)) ** (1 / |y|); GSPO, eq. 7."""
    likelihood = math.prod(math.exp(a - b) for a, b in zip(logprobs, anchor, strict=True))
    return likelihood ** (1 / len(logprobs))


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def policy_gradient(response: Response) -> list[float]:
    return [-a * lp for a, lp in zip(response.advantages, response.logprobs, strict=True)]


def ppo_clip(low: float, high: float, dual: float = math.inf) -> TokenReference:
    def of(response: Response) -> list[float]:
        losses = []
        for lp, old, a in zip(response.logprobs, response.anchor, response.advantages, strict=True):
            objective = -surrogate(math.exp(lp - old), a, low, high)
            if a < 0 and dual < math.inf:
                objective = max(objective, dual * a)
            losses.append(-objective)
        return losses

    return of


def gspo(low: float, high: float) -> TokenReference:
    """Return the loss of GSPO, eq. 14: sg[s] · π / sg[π]."""

    def of(response: Response) -> list[float]:
        ratio = geometric_mean_ratio(response.held, response.anchor)
        return [
            surrogate(ratio * math.exp(lp) / math.exp(held), a, low, high)
            for lp, held, a in zip(
                response.logprobs, response.held, response.advantages, strict=True
            )
        ]

    return of


def cispo(low: float, high: float) -> TokenReference:
    def of(response: Response) -> list[float]:
        return [
            -clip(math.exp(held - old), 1 - low, 1 + high) * a * lp
            for lp, held, old, a in zip(*response, strict=True)
        ]

    return of


def sapo(positive: float, negative: float) -> TokenReference:
    def of(response: Response) -> list[float]:
        losses = []
        for lp, old, a in zip(response.logprobs, response.anchor, response.advantages, strict=True):
            tau = positive if a > 0 else negative
            sigmoid = 1 / (1 + math.exp(-tau * (math.exp(lp - old) - 1)))
            losses.append(-(4 / tau) * sigmoid * a)
        return losses

    return of


def total_variation(p: float, q: float) -> float:
    """Return half the sum of differences over the two outcomes."""
    return (abs(p - q) + abs((1 - p) - (1 - q))) / 2


def kl_divergence(p: float, q: float) -> float:
    """Return the KL divergence of Bernoulli(q) from Bernoulli(p)."""
    return sum(a * math.log(a / b) for a, b in ((p, q), (1 - p, 1 - q)))


def dppo(divergence: Callable[[float, float], float], low: float, high: float) -> TokenReference:
    """Return the loss of DPPO, eq. 12: M · r · A. The mask has no gradient, so it uses `held`."""

    def of(response: Response) -> list[float]:
        losses = []
        for lp, held, old, a in zip(*response, strict=True):
            distance = divergence(math.exp(old), math.exp(held))
            if a > 0:
                is_kept = held <= old or distance <= high
            else:
                is_kept = held >= old or distance <= low
            losses.append(-math.exp(lp - old) * a if is_kept else 0.0)
        return losses

    return of


def of_batch(reference: TokenReference, responses: Sequence[Response]) -> list[float]:
    """Return the losses of all responses, concatenated."""
    return [loss for response in responses for loss in reference(response)]
