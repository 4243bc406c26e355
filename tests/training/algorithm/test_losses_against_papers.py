"""Every policy loss compared with its paper: values token by token, gradients by finite
differences.
"""

import random

import loss_references as papers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from april_rl.training.algorithm import losses
from april_rl.training.algorithm.losses import LossInputs
from april_rl.training.algorithm.responses import Responses

STEP = 1e-6  # of the central difference; its error is some 1e-9 in float64
PAIRS = {
    "policy_gradient": (losses.policy_gradient, papers.policy_gradient),
    "ppo": (
        lambda inputs: losses.ppo_clip(inputs, clip_low=0.2, clip_high=0.28),
        papers.ppo_clip(0.2, 0.28),
    ),
    "dual_clip": (
        lambda inputs: losses.ppo_clip(inputs, clip_low=0.2, clip_high=0.28, dual_clip=1.4),
        papers.ppo_clip(0.2, 0.28, 1.4),
    ),
    "gspo": (
        lambda inputs: losses.gspo(inputs, clip_low=0.03, clip_high=0.04),
        papers.gspo(0.03, 0.04),
    ),
    "cispo": (
        lambda inputs: losses.cispo(inputs, clip_low=0.5, clip_high=0.3),
        papers.cispo(0.5, 0.3),
    ),
    "sapo": (losses.sapo, papers.sapo(1.0, 1.05)),
    "dppo_tv": (
        lambda inputs: losses.dppo(
            inputs, divergence=losses.binary_tv, threshold_low=0.03, threshold_high=0.05
        ),
        papers.dppo(papers.total_variation, 0.03, 0.05),
    ),
    "dppo_kl": (
        lambda inputs: losses.dppo(
            inputs, divergence=losses.binary_kl, threshold_low=0.005, threshold_high=0.01
        ),
        papers.dppo(papers.kl_divergence, 0.005, 0.01),
    ),
}


def random_responses(seed: int, lengths: list[int]) -> list[papers.Response]:
    """Return responses with log-ratios spread by 0.3, so that many tokens are beyond
    every bound.
    """
    draw = random.Random(seed)
    found = []
    for length in lengths:
        logprobs = [-draw.expovariate(1.0) for _ in range(length)]
        anchor = [min(lp + draw.gauss(0, 0.3), -1e-3) for lp in logprobs]
        advantages = [draw.gauss(0, 1)] * length
        found.append(papers.Response(logprobs, list(logprobs), anchor, advantages))
    return found


def inputs_of(responses: list[papers.Response]) -> LossInputs:
    def join(field: int) -> torch.Tensor:
        values = [value for response in responses for value in response[field]]
        return torch.tensor(values, dtype=torch.float64)

    return LossInputs(
        logprobs=join(0).requires_grad_(),
        anchor_logprobs=join(2),
        advantages=join(3),
        behaviour_logprobs=join(2),
        responses=Responses.of([len(response.logprobs) for response in responses]),
    )


def total(reference: papers.TokenReference, response: papers.Response, weights: list[float]):
    return sum(w * loss for w, loss in zip(weights, reference(response), strict=True))


def finite_differences(
    reference: papers.TokenReference, responses: list[papers.Response], weights: list[list[float]]
) -> list[float]:
    slopes = []
    for response, own in zip(responses, weights, strict=True):
        for t in range(len(response.logprobs)):
            ends = []
            for step in (STEP, -STEP):
                moved = list(response.logprobs)
                moved[t] += step
                ends.append(total(reference, response._replace(logprobs=moved), own))
            slopes.append((ends[0] - ends[1]) / (2 * STEP))
    return slopes


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_a_loss_equals_the_formula_of_its_paper_for_every_token(name, seed, lengths):
    """Planted bugs: the geometric mean over one token too many; bounds swapped."""
    ours, reference = PAIRS[name]
    responses = random_responses(seed, lengths)
    found = ours(inputs_of(responses)).loss.tolist()
    assert found == pytest.approx(papers.of_batch(reference, responses), abs=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_a_gradient_is_the_finite_difference_of_the_papers_loss(name):
    """Loss weights differ from token to token, as with age weights. With 40 responses, each kind of
    token occurs. Planted bug: the mean ratio of `gspo` is not stopped.
    """
    ours, reference = PAIRS[name]
    responses = random_responses(3, [1, 2, 5, 9] * 10)
    draw = random.Random(4)
    weights = [[draw.random() for _ in response.logprobs] for response in responses]
    inputs = inputs_of(responses)
    loss = ours(inputs)
    flat = torch.tensor([w for own in weights for w in own], dtype=torch.float64)
    [gradient] = torch.autograd.grad((loss.loss * flat).sum(), inputs.logprobs)
    expected = finite_differences(reference, responses, weights)
    assert gradient.tolist() == pytest.approx(expected, abs=1e-7)
    if name in ("ppo", "dual_clip", "gspo", "dppo_tv", "dppo_kl"):
        assert 0.05 < loss.clipped.double().mean() < 0.6
        assert loss.clipped.tolist() == (gradient == 0).tolist()


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_without_response_tokens_has_an_empty_loss(name):
    """A rank without responses has a loss of zero, with gradients."""
    empty = torch.zeros(0)
    inputs = LossInputs(
        logprobs=empty,
        anchor_logprobs=empty,
        advantages=empty,
        behaviour_logprobs=empty,
        responses=Responses.of([]),
    )
    loss = PAIRS[name][0](inputs)
    assert loss.loss.shape == loss.clipped.shape == (0,)
