"""Generalised advantage estimation and the value loss compared with their formulas in float64."""

import pytest
import torch
from torch import Tensor

from april_rl.training.algorithm.gae import gae, value_loss
from april_rl.training.algorithm.responses import Responses

LENGTHS = [5, 1, 0, 17]


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    """Return random rewards and values [T] of all tokens in float64."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(LENGTHS), dtype=torch.float64, generator=generator)
    return rewards, values


def by_sum(rewards: Tensor, values: Tensor, decay: float) -> Tensor:
    """Compute Schulman et al. 2016, eq. 16, as it is written: a weighted sum over the
    later deltas.
    """
    following = torch.cat([values[1:], values.new_zeros(1)])
    deltas = rewards + following - values
    num = len(values)
    weights = [[decay ** (k - t) if k >= t else 0.0 for k in range(num)] for t in range(num)]
    return torch.tensor(weights, dtype=torch.float64).reshape(num, num) @ deltas


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
def test_advantages_equal_the_formula_in_every_response(decay):
    """Fails when a value or a delta of one response reaches another response."""
    rewards, values = drawn(0)
    found = gae(rewards, values, Responses.of(LENGTHS), decay=decay)
    pairs = zip(rewards.split(LENGTHS), values.split(LENGTHS), strict=True)
    expected = torch.cat([by_sum(*pair, decay) for pair in pairs])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_value_loss_equals_its_formula_with_and_without_a_clip():
    """Fails when the clip is around the target, or the smaller of the two losses is used."""
    values, returns = drawn(2)
    old_values = values + drawn(3)[0]
    plain = value_loss(values, returns, old_values=old_values, clip=None)
    torch.testing.assert_close(plain, 0.5 * (values - returns) ** 2)
    clipped = value_loss(values, returns, old_values=old_values, clip=0.3)
    near = torch.minimum(torch.maximum(values, old_values - 0.3), old_values + 0.3)
    expected = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    torch.testing.assert_close(clipped, expected)
    assert (clipped > plain).any()
