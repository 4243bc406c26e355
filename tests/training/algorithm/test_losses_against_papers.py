"""Every policy loss compared with its paper: values and gradients, token by token."""

from typing import Any

import plain_objective
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import LOSS_SETTINGS, Correction, Loss, Ratio
from april_rl.training.algorithm.losses import LossInputs, loss_function
from april_rl.training.algorithm.responses import Responses

PPO = {"clip_low": 0.15, "clip_high": 0.25, "dual_clip": None}
BYPASS = {"ratio": Ratio.behaviour, "correction": Correction.none}
LOSSES: dict[str, dict[str, Any]] = {
    "policy_gradient": {"loss": "policy_gradient"},
    "ppo": {"loss": "ppo_clip", **PPO},
    "dual_clip": {"loss": "ppo_clip", **PPO, "dual_clip": 1.4},
    "gspo": {"loss": "gspo", "clip_low": 0.03, "clip_high": 0.04},
    "cispo": {"loss": "cispo", "clip_low": 0.5, "clip_high": 0.3},
    "sapo": {"loss": "sapo"},
    "dppo_tv": {"loss": "dppo_tv", **BYPASS, "clip_low": 0.03, "clip_high": 0.05},
    "dppo_kl": {"loss": "dppo_kl", **BYPASS, "clip_low": 0.005, "clip_high": 0.01},
}


def random_inputs(seed: int, lengths: list[int]) -> LossInputs:
    """Return responses with log-ratios spread by 0.3, so that many tokens are beyond
    every bound.
    """
    draw = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    logprobs = -torch.empty(size, dtype=torch.float64).exponential_(generator=draw)
    noise = torch.randn(size, dtype=torch.float64, generator=draw)
    anchor = (logprobs + 0.3 * noise).clamp(max=-1e-3)
    of_responses = torch.randn(len(lengths), dtype=torch.float64, generator=draw)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        anchor_logprobs=anchor,
        advantages=of_responses.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        behaviour_logprobs=anchor,
        responses=Responses.of(lengths),
    )


def of_paper(name: str, inputs: LossInputs, lengths: list[int]) -> Tensor:
    """Return the losses of all responses, one response after the other."""
    fields = (inputs.logprobs, inputs.anchor_logprobs, inputs.advantages)
    parts = zip(*(field.split(lengths) for field in fields), strict=True)
    chosen = PPO | LOSSES[name]
    return torch.cat(
        [
            plain_objective.token_losses(logprobs, anchor, a[0].item(), settings=chosen)
            for logprobs, anchor, a in parts
        ]
    )


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_a_loss_equals_the_formula_of_its_paper_for_every_token(name, seed, lengths):
    """Planted bugs: the geometric mean over one token too many; bounds swapped."""
    inputs = random_inputs(seed, lengths)
    found = loss_function(AlgorithmConfig(**LOSSES[name]))(inputs).loss
    expected = of_paper(name, inputs, lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_is_that_of_the_papers_loss(name):
    """Loss weights differ from token to token, as with age weights. With 40 responses, each kind of
    token occurs. Planted bug: the mean ratio of `gspo` is not stopped.
    """
    lengths = [1, 2, 5, 9] * 10
    inputs = random_inputs(3, lengths)
    weights = torch.rand(sum(lengths), dtype=torch.float64)
    loss = loss_function(AlgorithmConfig(**LOSSES[name]))(inputs)
    [gradient] = torch.autograd.grad((loss.loss * weights).sum(), inputs.logprobs)
    total = (of_paper(name, inputs, lengths) * weights).sum()
    [expected] = torch.autograd.grad(total, inputs.logprobs)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    if name in ("ppo", "dual_clip", "gspo", "dppo_tv", "dppo_kl"):
        assert 0.05 < loss.clipped.double().mean() < 0.6
        assert loss.clipped.tolist() == (gradient == 0).tolist()


def test_every_setting_of_a_loss_is_set_above():
    """A setting that is not listed for a loss is refused."""
    read = {loss: set[str]() for loss in Loss}
    for settings_ in LOSSES.values():
        read[Loss(settings_["loss"])] |= settings_.keys() - {"loss", "ratio", "correction"}
    assert read == {loss: set(keys) for loss, keys in LOSS_SETTINGS.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_without_response_tokens_has_an_empty_loss(name):
    """A rank without responses has a loss of zero, with gradients."""
    loss = loss_function(AlgorithmConfig(**LOSSES[name]))(random_inputs(0, []))
    assert loss.loss.shape == loss.clipped.shape == (0,)
