"""Functions for algorithm.loss, algorithm.advantage and algorithm.group_filter, valid and invalid
ones.
"""

import numpy as np
import torch

from april_rl.training.algorithm.losses import TokenLoss


def by_ratio(inputs, *, high=2.0):
    ratio = (inputs.logprobs - inputs.anchor_logprobs).exp()
    clipped = ratio > high
    loss = -torch.where(clipped, 0.0, ratio) * inputs.advantages
    return TokenLoss(loss, clipped, {"distance": (ratio - 1).abs()})


def plain(inputs):
    return -inputs.logprobs * inputs.advantages


def without_gradient(inputs):
    return inputs.logprobs.detach()


def summed(inputs):
    return plain(inputs).sum()


def of_numbers(inputs):
    return inputs.logprobs.tolist()


def wrong_metric(inputs):
    return TokenLoss(plain(inputs), inputs.logprobs > 0, {"distance": inputs.logprobs.mean()})


def metric_of_a_number(inputs):
    return TokenLoss(plain(inputs), inputs.logprobs > 0, {"distance": 1.0})


def logarithm(inputs):
    """Return NaN where an advantage is below -2, which does not occur in the trial at the start."""
    return plain(inputs) * (inputs.advantages + 2).log()


def metric_with_nan(inputs):
    return TokenLoss(plain(inputs), inputs.logprobs > 0, {"root": inputs.logprobs.sqrt()})


def distance_from_anchor(inputs):
    """Return a finite value whose gradient is not finite where both are equal."""
    return (inputs.logprobs - inputs.anchor_logprobs).square().sqrt() * inputs.advantages


def in_place(inputs):
    inputs.advantages.zero_()
    inputs.behaviour_logprobs.clamp_(min=-1e-3)
    inputs.logprobs.clamp_(max=0)
    return torch.ones(len(inputs.logprobs))


def largest(inputs):
    ratio = (inputs.logprobs - inputs.anchor_logprobs).exp()
    return TokenLoss(plain(inputs), ratio > 2, {"max": ratio.max().expand_as(ratio)})


def only_wrong(inputs):
    """Fail where no response is wrong."""
    wrong = inputs.logprobs[inputs.advantages < 0]
    return plain(inputs) + wrong[0]


def spaces(inputs):
    return TokenLoss(plain(inputs), inputs.logprobs > 0, {"Log ratio": inputs.logprobs})


def wrong_clipped(inputs):
    return TokenLoss(plain(inputs), (inputs.logprobs > 0)[:2])


def raises(*_):
    raise ZeroDivisionError("no tokens")


def needs(inputs, *, tau):
    return plain(inputs) * tau


def signs(_samples, rewards, *, scale=1.0):
    return [scale * np.sign(np.asarray(group) - np.mean(group)) for group in rewards]


def by_token(samples, _rewards):
    return [[np.arange(sample.num_tokens) for sample in group] for group in samples]


def one_for_all(samples, _rewards):
    return [[1.0] for _ in samples]


def too_short(samples, _rewards):
    return [[np.ones(1) for _ in group] for group in samples]


def not_finite(samples, _rewards):
    return [[float("nan") for _ in group] for group in samples]


def infinite_in_float32(samples, _rewards):
    return [[1e39 for _ in group] for group in samples]


def flat(_samples, rewards):
    return np.concatenate(rewards)


def texts(samples, _rewards):
    return [["1" for _ in group] for group in samples]


def by_column(samples, _rewards):
    return [[float(sample.prompt.columns["level"]) for sample in group] for group in samples]


def forgets_return(scored):
    scored.rewards[0] > 0  # noqa: B015


def counts(scored):
    return sum(scored.rewards)


def rejects_all(_scored):
    return False


def is_mixed(scored, *, least=1):
    return least <= sum(reward > 0 for reward in scored.rewards) < len(scored.rewards)
