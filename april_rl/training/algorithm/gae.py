"""Advantages from the values of a critic, and the critic's loss.

Legend: [T] response tokens of whole responses, one after another; V_t is the value of the state in
which token t is sampled, R_t its target. The discount is 1, because a reward at the end of a
response should not depend on its length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from april_rl.training.algorithm.responses import Responses


def gae(rewards: Tensor, values: Tensor, responses: Responses, *, decay: float) -> Tensor:
    """Σ_k λ^k δ_(t+k) [T] with δ_t = r_t + V_(t+1) - V_t and λ = `decay`; Schulman et al. 2016
    ("High-dimensional continuous control using generalized advantage estimation"), eq. 16.

    A sum ends with its response: the value after the last token is 0, even if the response was cut.
    With λ = 1 an advantage is the sum of the rewards still to come minus V_t. It is computed on the
    host in float64, in one pass over the tokens; a GPU would need a kernel for each token.
    """
    earned, valued = rewards.tolist(), values.tolist()
    found = [0.0] * len(valued)
    end = 0
    for length in responses.lengths.tolist():
        start, end = end, end + length
        next_value = advantage = 0.0
        for t in range(end - 1, start - 1, -1):
            advantage = earned[t] + next_value - valued[t] + decay * advantage
            found[t] = advantage
            next_value = valued[t]
    return torch.tensor(found, dtype=values.dtype, device=values.device)


def value_loss(
    values: Tensor, returns: Tensor, *, old_values: Tensor, clip: float | None
) -> Tensor:
    """½ (V - R)² [T]; with a clip ε it is ½ max((V - R)², (V' - R)²), where V' is V limited to
    within ε of the value before the update, as in OpenAI's baselines (ppo2), the code of Schulman
    et al. 2017.
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return loss / 2
