"""An independent loss of a minibatch, one response at a time in plain torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Settings = Mapping[str, Any]  # names and values of the settings in `algorithm`


class Response(NamedTuple):
    """Inputs of the loss of one response; tensors are [R]."""

    logprobs: Tensor  # with gradient
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor
    advantage: float
    token_weights: list[float]  # by age, 0 beyond the cap


def objective(responses: Sequence[Response], settings: Settings, *, budget: int) -> Tensor:
    """Return the loss of the whole minibatch; `budget` is rollout.max_response_tokens."""
    shares = _shares(responses, settings["aggregation"], budget)
    total = torch.zeros(())
    for response, share in zip(responses, shares, strict=True):
        held = response.logprobs.detach()
        is_bypass = settings["ratio"] == "behaviour"
        anchor = response.behaviour if is_bypass else response.proximal
        w = torch.exp((held if is_bypass else response.proximal) - response.behaviour)
        values = token_losses(response.logprobs, anchor, response.advantage, settings=settings)
        values = values + settings["entropy_coefficient"] * response.logprobs**2 / 2
        values = values + settings["kl_coefficient"] * _divergence(response, settings["kl"])
        counts = torch.tensor(share) * _weight(w, settings) * _mask(w, settings)
        left = float((response.behaviour - held).mean()) > (settings["opsm_threshold"] or math.inf)
        counts = counts * float(not (left and response.advantage < 0))
        total = total + (counts * values).sum()
    return total


def token_losses(logprobs: Tensor, anchor: Tensor, a: float, *, settings: Settings) -> Tensor:
    """Return the loss of each token, as in the papers that `losses.py` names."""
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    r, held = torch.exp(logprobs - anchor), logprobs.detach()
    s = torch.exp((logprobs - anchor).mean()).expand(len(r))
    name = settings["loss"]
    if name == "policy_gradient":
        return -a * logprobs
    if name == "cispo":
        return -torch.clamp(r, low, high).detach() * a * logprobs
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -(4 / tau) * torch.sigmoid(tau * (r - 1)) * a
    if name in ("dppo_tv", "dppo_kl"):
        p, q = torch.exp(anchor), torch.exp(held)
        kl = p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))
        distance = (q - p).abs() if name == "dppo_tv" else kl
        threshold = settings["clip_high" if a > 0 else "clip_low"]
        return -r * a * ~((distance > threshold) & (a * (q - p) > 0))
    if name == "gspo":
        s = s.detach() * torch.exp(logprobs) / torch.exp(held)
    ratio = r if name == "ppo_clip" else s
    gain = torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a)
    if settings["dual_clip"] and a < 0:
        gain = torch.clamp(gain, min=settings["dual_clip"] * a)
    return -gain


def _divergence(response: Response, kind: str) -> Tensor:
    d = response.reference - response.logprobs
    return {"none": torch.zeros_like(d), "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}[kind]


def _weight(w: Tensor, settings: Settings) -> Tensor:
    usual = [0.5, 5.0] if settings["correction"] == "mask" else [0.0, 2.0]
    low, high = settings["weight_bounds"] or usual
    cap = torch.tensor(high)
    return {
        "none": torch.ones_like(w),
        "truncate": torch.minimum(w, cap),
        "mask": torch.where((w >= low) & (w <= high), w, 0.0),
        "sequence_truncate": torch.minimum(w.prod(), cap).expand(len(w)),
    }[settings["correction"]]


def _mask(w: Tensor, settings: Settings) -> float:
    bounds = settings["geometric_mask"]
    mean = float(w.double().prod()) ** (1 / len(w))
    return float(not bounds or bounds[0] <= mean <= bounds[1])


def _shares(responses: Sequence[Response], aggregation: str, budget: int) -> list[list[float]]:
    """Return the weight of each token, for each response."""
    weights = [response.token_weights for response in responses]
    counts = [sum(m > 0 for m in of_one) for of_one in weights]
    if aggregation == "constant_length":
        total = budget * sum(count > 0 for count in counts)
        return [[m / total for m in of_one] for of_one in weights]
    if aggregation == "sequence_mean":
        weights = [[m / max(n, 1) for m in w] for w, n in zip(weights, counts, strict=True)]
    total = math.fsum(m for of_one in weights for m in of_one)
    return [[m / total for m in of_one] for of_one in weights]
